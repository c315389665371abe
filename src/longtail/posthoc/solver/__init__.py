"""One minimiser for every convex post-hoc problem: few passes over the data, to the optimum.

A problem gives its value and its gradient. If it also gives the 2x2 blocks of its Hessian (one per class) and a
version of itself on a subsample of the rows, few passes over all rows are needed, whatever the class sizes:

- a subsample is solved roughly first, then a larger one from that solution, then the problem on all rows;
- steps are those of L-BFGS in variables scaled by the blocks, in which head and tail classes are equally well
  conditioned (`lbfgs`); after some passes the blocks are computed again at the current point;
- near the optimum, changes of the value are lost in float32 rounding while the gradient is still accurate, so small
  changes of the value are computed from the gradient (trapezoid rule);
- the L-BFGS memory of a similar problem can be reused (`Solution.memory`): in the scaled variables the curvature is
  nearly the same;
- converged means that the largest entry of the gradient fell to the tolerance times that at the start; if float32
  rounding could hide that it did not, the last passes are computed in float64.

A problem that sums over several processes does so in its methods; as all processes see the same sums, they take the
same steps.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from longtail.posthoc.solver.lbfgs import Blocks, Memory, Search

ROUGH_TOLERANCE = 3e-2  # of subsamples: their solutions differ by more from that of all rows
SMALLEST_GOAL = 1e-13  # gradients below this are rounding errors of the sums that they are made of, relative to these
TRUSTED_ROUNDING = 1e-2  # share of the first gradient; with more rounding, float32 gives no direction


class Problem(ABC):
    """A smooth convex function of a vector; `paired` if that is [a, b] with one pair per class.

    Attributes:
        share: cost of one evaluation, as a share of a pass over all rows.
        unit: about how large the sums are whose difference the gradient is; their rounding in float64 is left of them.
        rounding: about how much rounding can change an entry of the gradient; 0 in float64.
    """

    paired = False
    share = 1.0
    unit = 1.0
    rounding = 0.0

    @abstractmethod
    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """One pass over the data."""

    def with_blocks(self, *points: np.ndarray) -> tuple[list[tuple[float, np.ndarray]], Blocks]:
        """Value and gradient at each point, and the blocks of the Hessian at the last, in one pass; if paired."""
        raise TypeError(f"{type(self).__name__} is not paired")

    def subsampled(self) -> Problem | None:
        """Nearly the same problem on a subsample of the rows; None if that would save nothing."""
        return None

    def refine(self) -> bool:
        """Compute in higher precision from now on; False if that is not possible."""
        return False


@dataclass(frozen=True)
class Solution:
    """Where the minimiser stopped.

    `evaluations` counts passes over all rows; a pass over a subsample counts as its share.
    `gradient` is its largest entry relative to the first; None where it was not computed.
    `ahead` is where the next step would go: closer to the optimum, but not evaluated. `memory` is the L-BFGS memory.
    """

    x: np.ndarray
    value: float
    converged: bool
    evaluations: int
    gradient: float | None
    seconds: float
    ahead: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)
    memory: Memory = field(default_factory=Memory, repr=False)


@dataclass(frozen=True)
class FitResult:
    """How a fit ended: the attribute `result_` of every method."""

    converged: bool
    iterations: int
    gradient: float | None
    seconds: float
    value: float | None = None

    @classmethod
    def of(cls, solution: Solution) -> FitResult:
        return cls(solution.converged, solution.evaluations, solution.gradient, solution.seconds, solution.value)

    @classmethod
    def closed_form(cls) -> FitResult:
        """A fit without iterations."""
        return cls(converged=True, iterations=0, gradient=None, seconds=0.0)


def minimise(
    problem: Problem,
    start: np.ndarray,
    *,
    first: float | None = None,
    memory: Memory | None = None,
    held: np.ndarray | None = None,
    tolerance: float = 1e-5,
    max_evaluations: int = 500,
) -> Solution:
    """Minimise a problem from `start`; warns if the tolerance is not reached.

    Args:
        problem: what to minimise.
        start: first point.
        first: largest entry of the gradient that the tolerance is relative to (default: that at the start). If it
            is given, the start is taken to be close to the optimum, and no subsample is solved first.
        memory: L-BFGS memory of the solution of a similar paired problem.
        held: (K,) classes of a paired problem whose first variable stays at its start.
        tolerance: largest entry of the gradient at the end, relative to the first.
        max_evaluations: passes over the data before giving up.
    """
    began = time.perf_counter()
    subsample = problem.subsampled() if first is None else None
    guess, passes, _ = _solve_roughly(subsample, start, max_evaluations) if subsample else (None, 0.0, 0.0)
    search = Search(problem, start, guess=guess, memory=memory, held=held)
    if problem.rounding > TRUSTED_ROUNDING * (first or search.first) and problem.refine():
        passes += search.passes
        search = Search(problem, start, guess=guess, memory=memory, held=held)
    search.passes += passes
    if first is None:
        first = search.first
    goal = max(tolerance * first, SMALLEST_GOAL * problem.unit)
    # The computed gradient may be off by the rounding, so it must be below the goal by as much.
    search.until(max(goal - problem.rounding, problem.rounding), max_evaluations)
    if goal < 2 * problem.rounding and problem.refine():
        search.point = search.evaluate(search.point.x, blocks=True)
    goal -= problem.rounding
    search.until(goal, max_evaluations)
    point, relative = search.point, search.point.largest / first if first else 0.0
    passes = math.ceil(search.passes - 1e-9)
    converged = point.largest <= goal  # False if it is NaN
    if not converged:
        warnings.warn(
            f"not solved: after {passes} passes the largest entry of the gradient is {relative:.1e} "
            f"of its first value, {tolerance:.0e} was asked for; increase max_iter or ridge",
            ConvergenceWarning,
            stacklevel=2,
        )
    seconds = time.perf_counter() - began
    return Solution(point.x, point.value, converged, passes, relative, seconds, search.ahead(), search.memory)


def _solve_roughly(problem: Problem, start: np.ndarray, limit: int) -> tuple[np.ndarray, float, float]:
    """Approximate solution of a subsample, smaller subsamples first; passes; largest entry of the first gradient."""
    subsample, first, passes = problem.subsampled(), 0.0, 0.0
    if subsample is not None:
        start, passes, first = _solve_roughly(subsample, start, limit)
    search = Search(problem, start)
    first = first or search.first
    search.until(ROUGH_TOLERANCE * first, limit)
    return search.point.x, passes + search.passes, first
