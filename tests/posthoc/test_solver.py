import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from longtail.posthoc.curvature import Blocks
from longtail.posthoc.solver import Problem, minimise


class Quadratic(Problem):
    """Pairs (a_j, b_j) with curvatures over many decades; float32 noise on the value if asked."""

    paired = True

    def __init__(self, classes=30, noise=0.0, coupling=0.0):
        rng = np.random.default_rng(0)
        scales = 10.0 ** rng.uniform(-4, 4, classes)
        factors = rng.normal(size=(classes, 2, 2))
        blocks = (factors @ factors.transpose(0, 2, 1) + 0.1 * np.eye(2)) * scales[:, None, None]
        self.aa, self.ab, self.bb = blocks[:, 0, 0], blocks[:, 0, 1], blocks[:, 1, 1]
        self.best = rng.normal(size=2 * classes)
        self.noise, self.coupling = noise, coupling
        self.calls = 0

    def value_and_gradient(self, x):
        self.calls += 1
        d = x - self.best
        a, b = np.split(d, 2)
        gradient = np.concatenate([self.aa * a + self.ab * b, self.ab * a + self.bb * b])
        gradient = gradient + self.coupling * d.sum()
        value = 0.5 * d @ gradient
        noise = self.noise * np.sin(1e9 * x.sum()) if self.noise else 0.0
        return value + 1.0 + noise, gradient

    def with_blocks(self, x):
        return *self.value_and_gradient(x), Blocks(self.aa, self.ab, self.bb, np.full(len(self.aa), np.inf))


class Unpaired(Quadratic):
    paired = False


def test_scaling_makes_badly_scaled_classes_easy():
    problem = Quadratic()
    solution = minimise(problem, np.zeros(60), tolerance=1e-8)
    assert solution.converged
    assert solution.evaluations == problem.calls < 40
    np.testing.assert_allclose(solution.x, problem.best, atol=1e-2)


def test_noise_on_the_value_does_not_stop_it():
    """float32 leaves about 1e-7 of noise on the value; the gradient is good to much less."""
    solution = minimise(Quadratic(classes=5, noise=1e-7, coupling=1e-3), np.zeros(10), tolerance=1e-9)
    assert solution.converged
    assert solution.gradient <= 1e-9
    assert solution.evaluations < 20


def test_without_pairs_it_is_plain_l_bfgs():
    problem = Unpaired(classes=2)
    solution = minimise(problem, np.zeros(4), tolerance=1e-6)
    assert solution.converged


def test_a_start_at_the_optimum_costs_one_pass():
    problem = Quadratic()
    solution = minimise(problem, problem.best.copy(), first=1.0)
    assert solution.converged
    assert solution.evaluations == 1


def test_a_flat_problem_is_solved_at_once():
    problem = Quadratic()
    problem.best = np.zeros(60)
    solution = minimise(problem, np.zeros(60))
    assert solution.converged
    assert solution.gradient == 0


def test_a_gradient_that_is_no_number_is_loud():
    problem = Quadratic()
    problem.best = np.full(60, np.nan)
    with pytest.warns(ConvergenceWarning, match="not solved"):
        solution = minimise(problem, np.zeros(60))
    assert not solution.converged


def test_giving_up_is_loud():
    with pytest.warns(ConvergenceWarning, match="not solved: after 4 passes"):
        solution = minimise(Unpaired(), np.zeros(60), max_evaluations=4)
    assert not solution.converged
