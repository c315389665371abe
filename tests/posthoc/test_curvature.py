"""The parts that steps are made of: scaled variables, pairs, and where to look along a line."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from longtail.posthoc.solver import Problem, minimise
from longtail.posthoc.solver.lbfgs import Blocks, Scaling, quasi_newton

RNG = np.random.default_rng(0)
FACTORS = RNG.normal(size=(4, 2, 2))
BLOCKS = (FACTORS @ FACTORS.transpose(0, 2, 1) + 0.1 * np.eye(2)) * 10.0 ** np.arange(4)[:, None, None]
AA, AB, BB = BLOCKS[:, 0, 0], BLOCKS[:, 0, 1], BLOCKS[:, 1, 1]
FAR_AWAY = np.full(4, np.inf)


def by_class(x):
    return x.reshape(2, 4).T


def curvature(x):
    """Of each class along its part of x."""
    return np.einsum("ki,kij,kj->k", by_class(x), BLOCKS, by_class(x))


def test_every_block_is_the_identity_in_the_scaled_variables():
    scaling = Scaling(Blocks(AA, AB, BB, FAR_AWAY), np.ones(8))
    v = RNG.normal(size=8)
    np.testing.assert_allclose(curvature(scaling.step(v)), np.square(by_class(v)).sum(1), rtol=1e-9)
    assert not scaling.is_far


@pytest.mark.parametrize("flat", [None, RNG.normal(size=8)])
@pytest.mark.parametrize("reach", [np.inf, 1e-3])
def test_gradient_and_step_belong_together(flat, reach):
    """The change of the value along a step is the same in both kinds of variables."""
    g, v = RNG.normal(size=(2, 8))
    scaling = Scaling(Blocks(AA, AB, BB, np.full(4, reach), flat, 1e-3), g)
    assert scaling.gradient(g) @ v == pytest.approx(g @ scaling.step(v), rel=1e-9)


def test_a_class_beyond_its_reach_counts_as_steeper():
    g = RNG.normal(size=8)
    newton = np.sqrt(np.einsum("ki,kij,kj->k", by_class(g), np.linalg.inv(BLOCKS), by_class(g)))
    excess = np.array([0.2, 1.0, 4.0, 9.0])
    scaling = Scaling(Blocks(AA, AB, BB, newton / excess), g)
    v = RNG.normal(size=8)
    expected = np.square(by_class(v)).sum(1) / np.maximum(excess, 1)
    np.testing.assert_allclose(curvature(scaling.step(v)), expected, rtol=1e-9)
    # Far is where half of the classes would leave 0.3 of their reach.
    assert scaling.is_far
    for factor, is_far in ((0.29, False), (0.31, True)):
        assert Scaling(Blocks(AA, AB, BB, newton / factor), g).is_far == is_far


@pytest.mark.parametrize("known", [0.0, 1e-4])
def test_the_flat_direction_is_stretched_to_be_like_the_rest(known):
    flat = np.repeat([0.0, 2.0], 4)
    plain = Scaling(Blocks(AA, AB, BB, FAR_AWAY), np.ones(8))
    scaling = Scaling(Blocks(AA, AB, BB, FAR_AWAY, flat, known), np.ones(8))
    seen = np.concatenate([plain.cross * flat[4:], plain.second * flat[4:]])
    along = scaling.step(seen / np.linalg.norm(seen))
    np.testing.assert_allclose(along / along[-1], flat / 2, atol=1e-9)
    if known:
        assert known * along @ along == pytest.approx(1, rel=1e-9)
    across = RNG.normal(size=8)
    across -= seen * (seen @ across) / (seen @ seen)
    np.testing.assert_allclose(scaling.step(across), plain.step(across), rtol=1e-9)


def test_memory_is_the_inverse_of_bfgs():
    hessian = np.diag([1.0, 3.0, 10.0]) + 0.5
    steps = RNG.normal(size=(5, 3))
    memory = [(step, hessian @ step, step @ hessian @ step) for step in steps]
    step, change, _ = memory[-1]
    inverse = np.eye(3) * (step @ change) / (change @ change)
    for step, change, _ in memory:
        part = np.eye(3) - np.outer(step, change) / (step @ change)
        inverse = part @ inverse @ part.T + np.outer(step, step) / (step @ change)
    g = RNG.normal(size=3)
    np.testing.assert_allclose(quasi_newton(memory, g), -inverse @ g, rtol=1e-9)
    np.testing.assert_array_equal(quasi_newton([], g), -g)


class Line(Problem):
    """A function of one number."""

    def __init__(self, value, slope):
        self.value, self.slope, self.seen = value, slope, []

    def value_and_gradient(self, x):
        self.seen.append(float(x[0]))
        return self.value(x[0]), np.array([self.slope(x[0])])


def test_a_line_search_that_leads_nowhere_leaves_the_point():
    line = Line(lambda x: 1.0 if x == 0 else 2.0, lambda x: -1.0)
    with pytest.warns(ConvergenceWarning):
        solution = minimise(line, np.zeros(1), tolerance=1e-9, max_evaluations=1000)
    assert (solution.x, solution.value, solution.converged) == (0, 1.0, False)


@pytest.mark.parametrize(("noise", "converged"), [(1e-7, True), (1e-5, False)])
def test_small_changes_of_the_value_are_taken_from_the_slopes(noise, converged):
    """The value rises by some noise whatever happens; the slope alone shows the way."""
    line = Line(lambda x: 1.0 if x == 0 else 1 + noise, lambda x: 1e-7 * (x - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert minimise(line, np.zeros(1), tolerance=1e-3).converged == converged
