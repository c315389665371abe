import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from longtail.posthoc.solver import Problem, minimise
from longtail.posthoc.solver.lbfgs import Blocks


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

    def with_blocks(self, *points):
        values = [self.value_and_gradient(x) for x in points]
        self.calls -= len(points) - 1  # one pass for all
        return values, Blocks(self.aa, self.ab, self.bb, np.full(len(self.aa), np.inf))


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
    solution = minimise(Quadratic(noise=1e-7, coupling=1e-2), np.zeros(60), tolerance=1e-9)
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


class WithPart(Quadratic):
    """Has a smaller problem whose answer is somewhere else."""

    def __init__(self, off):
        super().__init__(coupling=1e-3)
        self.off = off

    def subsampled(self):
        part = Quadratic()
        part.best = self.best + self.off
        part.share = 0.25
        self.part = part
        return part


@pytest.mark.parametrize("off", [0.0, 1e-3, 1e3])
def test_a_part_helps_and_does_not_mislead(off):
    plain, problem = Quadratic(coupling=1e-3), WithPart(off)
    expected = minimise(plain, np.zeros(60), tolerance=1e-10)
    solution = minimise(problem, np.zeros(60), tolerance=1e-10)
    assert solution.converged
    assert solution.evaluations == np.ceil(problem.calls + 0.25 * problem.part.calls)
    assert solution.value <= expected.value + 1e-8
    if not off:
        assert problem.calls <= plain.calls


def test_a_known_flat_direction_costs_nothing():
    """Quadratics that differ by a shift common to all classes have nearly the same blocks."""

    class Flat(Quadratic):
        known = True

        def value_and_gradient(self, x):
            self.calls += 1
            d = x - self.best
            b = d[30:]
            gradient = np.concatenate([d[:30], b - b.mean()]) + 1e-6 * d
            return 0.5 * d @ gradient + 1.0, gradient

        def with_blocks(self, *points):
            flat = np.repeat([0.0, 1.0], 30)
            ones = np.ones(30)
            blocks = Blocks(ones, 0 * ones, ones, np.inf * ones, *((flat, 1e-6) if self.known else ()))
            return [self.value_and_gradient(x) for x in points], blocks

    known, unknown = Flat(), Flat()
    unknown.known = False
    solutions = [minimise(problem, np.zeros(60), tolerance=1e-8) for problem in (known, unknown)]
    assert all(solution.converged for solution in solutions)
    assert solutions[0].evaluations <= 4 < solutions[1].evaluations


def test_steps_beyond_the_reach_of_the_blocks_are_damped():
    """A logistic loss far on its flat side: the block is tiny there, and Newton's step much too long."""

    class Logistic(Problem):
        paired = True
        trials = ()

        def value_and_gradient(self, x):
            self.trials = (*self.trials, float(np.abs(x).max()))
            p = 1 / (1 + np.exp(-x))
            return float(np.sum(np.logaddexp(0, x) - 0.5 * x)), p - 0.5

        def with_blocks(self, x):
            p = 1 / (1 + np.exp(-x))
            a, b = np.split(p * (1 - p), 2)
            return [self.value_and_gradient(x)], Blocks(a, 0 * a, b, np.sqrt(b))

    problem = Logistic()
    solution = minimise(problem, np.full(8, 12.0), tolerance=1e-8)
    assert solution.converged
    assert max(problem.trials) < 1e3  # Newton's first step: 8e4
    np.testing.assert_allclose(solution.x, 0, atol=1e-6)
