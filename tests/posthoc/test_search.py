"""The order of a search: parts first, rounds, when float64 is asked for, and when nothing more is tried."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from longtail.posthoc.solver import Problem, _Search, minimise
from longtail.posthoc.solver.curvature import Blocks, Memory


class Bowl(Problem):
    """Half the square of the distance to a point; says what it is told to say about rounding."""

    def __init__(self, best, *, rounding=0.0, refined=0, part=None, share=1.0, error=0.0):
        self.best, self.share, self.part, self.error = np.asarray(best, dtype=float), share, part, error
        self.told, self.refined, self.seen = rounding, refined, []

    @property
    def rounding(self):
        return self.told

    def refine(self):
        """So many times."""
        self.refined -= 1
        self.told = 0.0
        self.error = 0.0
        return self.refined >= 0

    def subsampled(self):
        return self.part

    def value_and_gradient(self, x):
        self.seen.append(x.copy())
        d = x - self.best
        return 0.5 * float(d @ d) + 1.0, d + self.error

    def with_start(self, start, x):
        here = self.value_and_gradient(start)
        self.seen.pop()  # one pass for both
        return here, (*self.value_and_gradient(x), None)


class Paired(Bowl):
    paired = True

    def with_blocks(self, x):
        half = len(x) // 2
        one = np.ones(half)
        return *self.value_and_gradient(x), Blocks(one, 0 * one, one, np.inf * one)


def test_what_a_problem_says_of_itself_if_it_says_nothing():
    class Plain(Problem):
        def value_and_gradient(self, x):
            return 0.0, x

    plain = Plain()
    assert (plain.paired, plain.share, plain.rounding, plain.refine(), plain.subsampled()) == (
        False,
        1.0,
        0.0,
        False,
        None,
    )
    with pytest.raises(TypeError, match="Plain is not paired"):
        plain.with_blocks(np.zeros(2))
    with pytest.raises(TypeError, match="Plain has no subsampled version"):
        plain.with_start(np.zeros(2), np.zeros(2))


def test_a_start_that_is_near_already_asks_no_part():
    part = Bowl([1.0, 0.0])
    assert minimise(Bowl([1.0, 0.0], part=part), np.zeros(2), tolerance=1e-3).converged
    assert part.seen
    given = Bowl([1.0, 0.0], part=Bowl([5.0, 5.0]))  # a known first gradient: the start is near already
    assert minimise(given, np.zeros(2), first=1.0, tolerance=1e-3).converged
    assert given.part.seen == []


def test_a_point_that_is_no_better_is_not_taken():
    search = _Search(Bowl([1.0, 0.0]), np.zeros(2), guess=np.array([2.0, 0.0]))  # as far from the best
    assert search.x.tolist() == [0, 0]
    assert search.gradient.tolist() == [-1, 0]
    search = _Search(Bowl([1.0, 0.0]), np.zeros(2), guess=np.array([1.5, 0.0]))
    assert search.x.tolist() == [1.5, 0]
    assert search.value == 1.125
    assert search.first == 1  # at the start
    assert search.passes == 1


def test_passes_of_parts_and_those_before_a_refinement_count():
    problem = Bowl([1.0, 0.0], part=Bowl([1.1, 0.0], share=0.5), rounding=0.5, refined=1)
    solution = minimise(problem, np.zeros(2), tolerance=0.2)
    assert solution.evaluations == np.ceil(len(problem.seen) + 0.5 * len(problem.part.seen))
    assert len(problem.seen) == 2
    assert solution.gradient == pytest.approx(0.1)


def test_where_rounding_hides_the_start_it_is_looked_at_again():
    """The first gradient is 1: rounding above a hundredth of it cannot be worked with."""
    for rounding, passes in ((0.011, 2), (0.01, 1)):
        problem = Bowl([1.0, 0.0], rounding=rounding, refined=1)
        minimise(problem, np.zeros(2), tolerance=1.02)
        assert len(problem.seen) == passes
    known = Bowl([1.0, 0.0], rounding=0.9, refined=1)
    minimise(known, np.zeros(2), first=100.0, tolerance=0.5)  # 0.9 of 100 is little
    assert len(known.seen) == 1
    for first, relative in ((None, 1.0), (3.0, 1 / 3)):  # of the first gradient that is right
        wrong = Bowl([1.0, 0.0], rounding=0.5, refined=1, error=np.array([-0.5, 0.0]))
        assert minimise(wrong, np.zeros(2), first=first, tolerance=1.0).gradient == pytest.approx(relative)


def test_the_last_passes_are_exact_where_rounding_is_more_than_half_the_goal():
    for tolerance, again in ((1e-3, True), (9e-3, True), (1e-2, False)):
        problem = Bowl([1.0, 0.5], rounding=5e-3, refined=1)
        assert minimise(problem, np.zeros(2), tolerance=tolerance).converged
        assert (problem.refined == 0) == again


def test_what_rounding_hides_counts_against_the_goal():
    """A gradient that is read as the goal may be larger by the rounding: that is not solved yet."""
    for rounding, passes in ((0.0, 1), (1e-3, 2)):
        problem = Bowl([1.0, 0.0], rounding=rounding)
        assert minimise(problem, np.array([0.9, 0.0]), first=10.0, tolerance=0.01).converged
        assert len(problem.seen) == passes


def test_a_search_of_a_part_counts_its_share_and_ends_with_it():
    part = Bowl(1e6 * np.ones(2), share=0.25)
    part.value_and_gradient = lambda x: (part.seen.append(x), (float(np.exp(-x).sum()), -np.exp(-x)))[1]  # never ends
    search = _Search(part, np.zeros(2))
    search.until(0.0, 8)
    assert search.passes == 0.25 * len(part.seen) == 2.0


def test_rounds_end_when_neither_value_nor_gradient_gets_smaller():
    """A gradient that does not belong to the value: every step leads uphill."""

    class Wrong(Bowl):
        def value_and_gradient(self, x):
            value, gradient = super().value_and_gradient(x)
            return value, -gradient

    wrong = Wrong([1.0, 0.0])
    with pytest.warns(ConvergenceWarning, match="not solved"):
        found = minimise(wrong, np.zeros(2), max_evaluations=10_000)
    assert not found.converged
    assert found.x.tolist() == [0, 0]
    assert len(wrong.seen) < 500
    hopeful = Wrong([1.0, 0.0], refined=3)  # each time it may be rounding
    with pytest.warns(ConvergenceWarning, match="not solved"):
        minimise(hopeful, np.zeros(2), max_evaluations=10_000)
    assert hopeful.refined < 0


def test_the_first_step_without_blocks_has_length_one_at_most():
    for best, first in (([3.0, 4.0], [0.6, 0.8]), ([0.3, 0.4], [0.3, 0.4])):
        problem = Bowl(best)
        minimise(problem, np.zeros(2), tolerance=1e-6)
        np.testing.assert_allclose(problem.seen[1], first)
    blocks = Paired([3.0, 4.0])
    assert minimise(blocks, np.zeros(2), tolerance=1e-6).evaluations == 2  # with them it is Newton's
    np.testing.assert_allclose(blocks.seen[1], [3, 4])


class Uneven(Paired):
    """Curvatures from 1 to 20, which the blocks do not know; `excess` is by how much a step goes beyond its reach."""

    excess = 0.1

    def value_and_gradient(self, x):
        self.seen.append(x.copy())
        d, steep = x - self.best, np.linspace(1, 20, len(x))
        return 0.5 * float(steep * d @ d) + 1.0, steep * d

    def with_blocks(self, x):
        value, gradient, blocks = super().with_blocks(x)
        return value, gradient, replace(blocks, reach=np.hypot(*np.split(gradient, 2)) / self.excess)


@pytest.mark.parametrize(("excess", "memory", "length"), [(0.1, None, 10), (0.5, None, 4), (0.5, Memory(), 10)])
def test_rounds_far_from_the_optimum_are_short(excess, memory, length):
    """Ten passes, but four where half of the classes leave their reach, unless a memory tells of the curvature."""
    problem = Uneven(np.arange(1.0, 41.0))
    problem.excess = excess
    search = _Search(problem, np.zeros(40), memory=memory)
    search._round(0.0, 1000.0)
    assert length <= search.passes - 1 < length + 3  # the last step may take some passes more
    assert search.passes == len(problem.seen)
    # The last pass gives the blocks of the next round.
    assert search.blocks is not None
    np.testing.assert_array_equal(search.blocks.reach, problem.with_blocks(search.x)[2].reach)


def test_a_solution_prints_its_numbers_and_not_what_it_carries_along():
    solution = minimise(Bowl([1.0, 0.0]), np.zeros(2))
    text = repr(solution)
    assert "converged=True" in text
    assert "ahead" not in text
    assert "memory" not in text
