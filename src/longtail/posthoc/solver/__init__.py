"""One minimiser for every convex post-hoc problem: few passes over the data, to the optimum.

A problem gives its value and its gradient. If it also gives the 2x2 blocks of its Hessian (one per class) and a
version of itself on a subsample of the rows, few passes over all rows are needed, whatever the class sizes:

- a subsample is solved roughly first, then a larger one from that solution, then the problem on all rows;
- steps are those of L-BFGS in variables scaled by the blocks, in which head and tail classes are equally well
  conditioned (`curvature`); after some passes the blocks are computed again at the current point;
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

from longtail.posthoc.solver.curvature import Blocks, Memory, Scaling, Unscaled

ROUGH_TOLERANCE = 3e-2  # of subsamples: their solutions differ by more from that of all rows
FAR_ROUND, ROUND = 4, 10  # passes before the blocks are computed again, far from the optimum and near it
SMALLEST_GOAL = 1e-13  # gradients below this are rounding errors of the sums that they are made of, relative to these
TRUSTED_ROUNDING = 1e-2  # share of the first gradient; with more rounding, float32 gives no direction
SMALL_CHANGE = 1e-6  # relative changes of the value below this are computed from the gradient
DECREASE, FLATTER = 1e-4, 0.9  # Wolfe's conditions on a step: the value falls, the slope gets smaller


class Problem(ABC):
    """A smooth convex function of a vector; `paired` if that is [a, b] with one pair per class."""

    paired = False
    share = 1.0
    """Cost of one evaluation, as a share of a pass over all rows."""

    @abstractmethod
    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """One pass over the data."""

    def with_blocks(self, x: np.ndarray) -> tuple[float, np.ndarray, Blocks]:
        """The same with the blocks of the Hessian, in one pass; for paired problems only."""
        raise TypeError(f"{type(self).__name__} is not paired")

    def subsampled(self) -> Problem | None:
        """Nearly the same problem on a subsample of the rows; None if that would save nothing."""
        return None

    def with_start(
        self, start: np.ndarray, x: np.ndarray
    ) -> tuple[tuple[float, np.ndarray], tuple[float, np.ndarray, Blocks]]:
        """Value and gradient at the start, and `with_blocks` at x, in one pass; for problems with a subsample."""
        raise TypeError(f"{type(self).__name__} has no subsampled version")

    @property
    def unit(self) -> float:
        """About how large the sums are whose difference the gradient is; their rounding in float64 is left of them."""
        return 1.0

    @property
    def rounding(self) -> float:
        """About how much rounding can change an entry of the gradient; 0 in float64."""
        return 0.0

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
    ahead: np.ndarray | None = field(default=None, repr=False)
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
        tolerance: largest entry of the gradient at the end, relative to the first.
        max_evaluations: passes over the data before giving up.
    """
    began = time.perf_counter()
    subsample = problem.subsampled() if first is None else None
    guess, passes, _ = _solve_roughly(subsample, start, max_evaluations) if subsample else (None, 0.0, 0.0)
    search = _Search(problem, start, guess=guess, memory=memory)
    if problem.rounding > TRUSTED_ROUNDING * (first or search.first) and problem.refine():
        passes += search.passes
        search = _Search(problem, start, guess=guess, memory=memory)
    search.passes += passes
    if first is None:
        first = search.first
    goal = max(tolerance * first, SMALLEST_GOAL * problem.unit)
    # The computed gradient may be off by the rounding, so it must be below the goal by as much.
    search.until(max(goal - problem.rounding, problem.rounding), max_evaluations)
    if goal < 2 * problem.rounding and problem.refine():
        search.evaluate_again()
    goal -= problem.rounding
    search.until(goal, max_evaluations)
    relative = search.largest / first if first else 0.0
    passes = math.ceil(search.passes - 1e-9)
    converged = search.largest <= goal  # False if it is NaN
    if not converged:
        warnings.warn(
            f"not solved: after {passes} passes the largest entry of the gradient is {relative:.1e} "
            f"of its first value, {tolerance:.0e} was asked for; increase max_iter or ridge",
            ConvergenceWarning,
            stacklevel=2,
        )
    seconds = time.perf_counter() - began
    return Solution(search.x, search.value, converged, passes, relative, seconds, search.ahead(), search.memory)


def _solve_roughly(problem: Problem, start: np.ndarray, limit: int) -> tuple[np.ndarray, float, float]:
    """Approximate solution of a subsample, smaller subsamples first; passes; largest entry of the first gradient."""
    subsample, first, passes = problem.subsampled(), 0.0, 0.0
    if subsample is not None:
        start, passes, first = _solve_roughly(subsample, start, limit)
    search = _Search(problem, start)
    first = first or search.largest
    search.until(ROUGH_TOLERANCE * first, limit)
    return search.x, passes + search.passes, first


class _Search:
    """The current point, and steps that move it; it begins at `guess`, if the value is lower there than at the start.

    `first` is the largest entry of the gradient at the start.
    """

    def __init__(
        self, problem: Problem, start: np.ndarray, *, guess: np.ndarray | None = None, memory: Memory | None = None
    ) -> None:
        self.problem = problem
        self.passes = 0.0
        self.x = start
        self.memory = memory.copy() if memory else Memory()
        self._is_fresh = memory is None
        self._scaling: Scaling | Unscaled | None = None
        if guess is None:
            self.evaluate_again()
            self.first = self.largest
            return
        self.passes += problem.share
        at_start, at_guess = problem.with_start(start, guess)
        self.value, self.gradient, self.blocks = *at_start, None
        self.first = self.largest
        if at_guess[0] < self.value:
            self.x, (self.value, self.gradient, self.blocks) = guess, at_guess

    def _evaluate(self, x: np.ndarray, *, blocks: bool) -> tuple[float, np.ndarray, Blocks | None]:
        """Value, gradient and, if asked for and the problem has them, blocks at a point; one pass."""
        self.passes += self.problem.share
        if blocks and self.problem.paired:
            return self.problem.with_blocks(x)
        return *self.problem.value_and_gradient(x), None

    def evaluate_again(self) -> None:
        """Evaluate the current point with its blocks: at first, or after the problem was refined."""
        self.value, self.gradient, self.blocks = self._evaluate(self.x, blocks=True)

    @property
    def largest(self) -> float:
        """Largest entry of the gradient."""
        return float(np.abs(self.gradient).max())

    def until(self, goal: float, limit: int) -> None:
        """Rounds of steps until the gradient reaches the goal, progress stops or `limit` passes are used."""
        limit_here = limit * self.problem.share
        while self.largest > goal and self.passes < limit_here:
            before = self.value, self.largest
            if self.problem.paired and self.blocks is None:
                self.evaluate_again()
            self._round(goal, limit_here)
            is_slow = self.value > before[0] - SMALL_CHANGE * abs(before[0]) and self.largest > 0.5 * before[1]
            if is_slow and self.largest > goal and self.problem.refine():
                self.evaluate_again()
            elif not (self.value < before[0] or self.largest < before[1]):
                break

    def _round(self, goal: float, limit: float) -> None:
        """Steps of L-BFGS in one set of variables; the first round uses the given memory, if there is one."""
        is_scaled = self.blocks is not None
        self._scaling = scaling = Scaling(self.blocks, self.gradient) if self.blocks else Unscaled()
        length = math.inf if not is_scaled else FAR_ROUND if scaling.is_far and self._is_fresh else ROUND
        end = min(limit, self.passes + length * self.problem.share)
        if self._is_fresh:
            self.memory = Memory()
        self._is_fresh = True
        while self.largest > goal and self.passes < end:
            slopes = scaling.gradient(self.gradient)
            direction = self.memory.direction(slopes)
            if not slopes @ direction < 0:
                self.memory, direction = Memory(), -slopes
            # Without blocks, nothing determines the length of the first step.
            size = 1.0 if is_scaled or len(self.memory) else min(1.0, 1 / float(np.linalg.norm(slopes)))
            taken = self._step(scaling.step(direction), size, goal, limit, end)
            if taken is None:
                break
            self.memory.add(taken * direction, scaling.gradient(self.gradient) - slopes)

    def ahead(self) -> np.ndarray:
        """Where the next step would go; the current point, if there are no blocks."""
        scaling = self._scaling or (Scaling(self.blocks, self.gradient) if self.blocks else None)
        if scaling is None:
            return self.x
        return np.asarray(self.x + scaling.step(self.memory.direction(scaling.gradient(self.gradient))))

    def _step(self, direction: np.ndarray, size: float, goal: float, limit: float, end: float) -> float | None:
        """Line search along a direction; returns the step size, or None if no point is acceptable.

        Along a line the slope of a convex function only grows: steps are too short, too long, or good. The last pass
        of a round, at `end`, gives the blocks for the next one.
        """
        self.blocks = None
        slope = float(self.gradient @ direction)
        short, far = (0.0, slope), (math.inf, math.nan)
        while self.passes < limit and far[0] - short[0] > 1e-12:
            x = self.x + size * direction
            is_last = self.passes + self.problem.share >= end - 1e-9
            value, gradient, blocks = self._evaluate(x, blocks=is_last)
            there = float(gradient @ direction)
            change = value - self.value
            if abs(change) < SMALL_CHANGE * abs(value):
                change = 0.5 * size * (slope + there)
            is_low = change <= DECREASE * size * slope
            if is_low and (abs(there) <= -FLATTER * slope or np.abs(gradient).max() <= goal):
                self.x, self.value, self.gradient, self.blocks = x, value, gradient, blocks
                return size
            if is_low and there < 0:
                short = (size, there)
            else:
                far = (size, there)
            size = _next_size(short, far)
        return None


def _next_size(short: tuple[float, float], far: tuple[float, float]) -> float:
    """The step size where a line through both slopes is 0, well inside; a longer one if none was too long."""
    if far[0] == math.inf:
        return 4 * short[0]
    width = far[0] - short[0]
    rise = far[1] - short[1]
    guess = -short[1] / rise if rise > 0 else 0.5
    return short[0] + width * min(max(guess, 0.1), 0.9)
