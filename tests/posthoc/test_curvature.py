"""The parts that steps are made of: scaled variables, pairs, and where to look along a line."""

import math

import numpy as np
import pytest

from longtail.posthoc.curvature import MEMORY, Blocks, Memory, Scaling, Unscaled
from longtail.posthoc.solver import Problem, _between, _Search

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
    assert Unscaled().gradient(g) is g
    assert Unscaled().step(v) is v
    assert not Unscaled().is_far


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


def test_a_class_whose_two_directions_look_alike_keeps_a_little_of_the_second():
    one = np.ones(1)
    scaling = Scaling(Blocks(4 * one, 6 * one, 9 * one, np.inf * one), np.ones(2))
    assert scaling.second == pytest.approx(np.sqrt(9e-12))
    assert np.isfinite(Scaling(Blocks(0 * one, 0 * one, 0 * one, np.inf * one), np.zeros(2)).step(np.zeros(2))).all()


def test_memory_is_the_inverse_of_bfgs():
    hessian = np.diag([1.0, 3.0, 10.0]) + 0.5
    memory, pairs = Memory(), []
    for _ in range(5):
        step = RNG.normal(size=3)
        memory.add(step, hessian @ step)
        pairs.append((step, hessian @ step))
    step, change = pairs[-1]
    inverse = np.eye(3) * (step @ change) / (change @ change)
    for step, change in pairs:
        part = np.eye(3) - np.outer(step, change) / (step @ change)
        inverse = part @ inverse @ part.T + np.outer(step, step) / (step @ change)
    g = RNG.normal(size=3)
    np.testing.assert_allclose(memory.direction(g), -inverse @ g, rtol=1e-9)
    np.testing.assert_array_equal(Memory().direction(g), -g)


def test_memory_keeps_the_last_pairs_and_none_that_bend_the_wrong_way():
    memory = Memory()
    memory.add(np.array([1.0, 0.0]), np.array([-1.0, 0.0]))
    memory.add(np.array([1.0, 0.0]), np.array([1e-13, 1.0]))
    assert len(memory) == 0
    for number in range(MEMORY + 5):
        memory.add(np.eye(2)[number % 2], (1.0 + number) * np.eye(2)[number % 2])
    assert len(memory) == MEMORY == 20
    other = memory.copy()
    other.add(np.ones(2), np.ones(2))
    np.testing.assert_allclose(memory.direction(np.array([0.0, 24.0])), [0, -1], rtol=1e-9)
    assert other.direction(np.array([0.0, 24.0]))[0] != 0


@pytest.mark.parametrize(
    ("short", "far", "expected"),
    [
        ((0.5, -1.0), (math.inf, math.nan), 2.0),
        ((0.0, -1.0), (1.0, 1.0), 0.5),
        ((1.0, -1.0), (3.0, 3.0), 1.5),
        ((0.0, -1.0), (1.0, 99.0), 0.1),
        ((0.0, -99.0), (1.0, 1.0), 0.9),
        ((0.0, -1.0), (1.0, -2.0), 0.5),
        ((2.0, -1.0), (4.0, -1.0), 3.0),
    ],
)
def test_where_to_look_next_along_a_line(short, far, expected):
    assert _between(short, far) == pytest.approx(expected)


class Line(Problem):
    """A function of one number."""

    def __init__(self, value, slope):
        self.value, self.slope, self.seen = value, slope, []

    def value_and_gradient(self, x):
        self.seen.append(float(x[0]))
        return self.value(x[0]), np.array([self.slope(x[0])])


def test_a_step_that_is_much_too_short_is_made_longer_and_one_too_far_shorter():
    for size, first_points in ((1e-3, [1e-3, 4e-3, 1.6e-2, 6.4e-2, 0.256]), (2.5, [2.5, 1.0])):
        bowl = Line(lambda x: 0.5 * (x - 1) ** 2 + 1, lambda x: x - 1)
        search = _Search(bowl, np.zeros(1))
        taken = search._step(np.ones(1), size, goal=1e-9, limit=100, end=100)
        assert bowl.seen[1:] == pytest.approx(first_points)
        assert search.x == taken == pytest.approx(first_points[-1])
        assert search.passes == 1 + len(first_points)
        assert search.value == bowl.value(taken)


def test_a_step_ends_with_the_passes_and_leaves_the_point():
    bowl = Line(lambda x: 0.5 * (x - 1) ** 2 + 1, lambda x: x - 1)
    search = _Search(bowl, np.zeros(1))
    assert search._step(np.ones(1), 1e-9, goal=1e-9, limit=4, end=100) is None
    assert len(bowl.seen) == 4
    assert search.x == 0
    uphill = _Search(bowl, np.zeros(1))
    assert uphill._step(-np.ones(1), 1.0, goal=0.0, limit=1000, end=1000) is None
    assert uphill.x == 0


def test_small_changes_of_the_value_are_taken_from_the_slopes():
    """The value is noise: it rises by 1e-7 whatever happens, and the slope alone tells the way."""
    noisy = Line(lambda x: 1.0 if x == 0 else 1 + 1e-7, lambda x: 1e-9 * (x - 1))
    search = _Search(noisy, np.zeros(1))
    assert search._step(np.ones(1), 1.0, goal=1e-12, limit=100, end=100) == 1.0
    loud = Line(lambda x: 1.0 if x == 0 else 1 + 1e-5, lambda x: 1e-9 * (x - 1))
    assert _Search(loud, np.zeros(1))._step(np.ones(1), 1.0, goal=1e-12, limit=100, end=100) is None


def test_exactly_three_tenths_of_the_reach_is_not_far():
    one = np.ones(1)
    for gradient, is_far in ((3.0, False), (3.1, True)):
        assert Scaling(Blocks(one, 0 * one, one, 10 * one), np.array([gradient, 0.0])).is_far == is_far
