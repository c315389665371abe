"""One minimiser for every convex post-hoc problem: few passes over the data, to the optimum.

A problem gives its value and its gradient. Where it also has the 2x2 blocks of its Hessian (one per class)
and a smaller version of itself, the number of passes over all rows is small, whatever the class sizes:

- a small part of the rows is solved first, roughly, then a larger one from its answer, then all of them;
- steps are those of L-BFGS in variables scaled by the blocks, where all classes, head or tail, are equally easy
  (`curvature`); after some passes the blocks are taken anew where the search stands;
- near the optimum the change of the value drowns in float32 rounding while the gradient does not, so small changes
  of the value are taken from the gradient (trapezoid rule);
- what the solution of a similar problem learnt of the curvature can be passed on (`Solution.memory`): in the scaled
  variables it is nearly the same;
- "solved" means that the largest entry of the gradient fell to a given share of that at the start; if rounding in
  float32 could hide that it did not, the last passes are made in float64.

A problem that sums over several processes does so in its own methods; as all processes see the
same sums, they take the same steps.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from longtail.posthoc.curvature import Blocks, Memory, Scaling, Unscaled

ROUGH = 3e-2  # to what share a part is solved: its answer differs by more from that of all rows
FAR_ROUND, ROUND = 4, 10  # passes before the blocks are taken anew
NEGLIGIBLE = 1e-13  # a gradient that is rounding of a loss of about 1: there is nothing to move
TRUSTED = 1e-2  # share of the first gradient: if rounding is more, float32 cannot even tell where to begin
SMALL_CHANGE = 1e-6  # relative changes of the value below this are taken from the gradient
DECREASE, FLATTER = 1e-4, 0.9  # Wolfe's conditions on a step: value falls, slope is smaller


class Problem(ABC):
    """A smooth convex function of a vector; `paired` if that is [a, b] with one pair per class."""

    paired = False
    share = 1.0
    """How much of a pass over all rows one evaluation is."""

    @abstractmethod
    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """One pass over the data."""

    def with_blocks(self, x: np.ndarray) -> tuple[float, np.ndarray, Blocks]:
        """The same with the blocks of the Hessian, in one pass; asked only of paired problems."""
        raise TypeError(f"{type(self).__name__} is not paired")

    def smaller(self) -> Problem | None:
        """Nearly the same problem on fewer rows; None if that would save nothing."""
        return None

    def with_start(
        self, start: np.ndarray, x: np.ndarray
    ) -> tuple[tuple[float, np.ndarray], tuple[float, np.ndarray, Blocks]]:
        """Value and gradient at the start, and `with_blocks` at x, in one pass; asked only if `smaller` gives one."""
        raise TypeError(f"{type(self).__name__} has no smaller version")

    @property
    def rounding(self) -> float:
        """About how far rounding can change an entry of the gradient; 0 where that does not matter."""
        return 0.0

    def refine(self) -> bool:
        """Work more precisely from now on; False if that is not possible."""
        return False


@dataclass(frozen=True)
class Solution:
    """Where the minimiser stopped, and how good that is.

    `evaluations` counts passes over all rows; one over a part counts as its share.
    `gradient` is its largest entry relative to the first; None where it was not computed.
    `ahead` is where the next step would go: nearer to the optimum, but not looked at. `memory` is what the last steps
    tell of the curvature.
    """

    x: np.ndarray
    value: float
    converged: bool
    evaluations: int
    gradient: float | None
    seconds: float
    ahead: np.ndarray | None = field(default=None, repr=False)
    memory: Memory = field(default_factory=Memory, repr=False)


def minimise(
    problem: Problem,
    start: np.ndarray,
    *,
    first: float | None = None,
    memory: Memory | None = None,
    tolerance: float = 1e-5,
    max_evaluations: int = 500,
) -> Solution:
    """Minimise a problem from `start`; warns loudly if the tolerance is not reached.

    Args:
        problem: what to minimise.
        start: first point.
        first: largest entry of the gradient that the tolerance is a share of (default: that at the start). If it
            is given, the start counts as good already and no smaller problem is solved before.
        memory: of the solution of a similar paired problem.
        tolerance: largest entry of the gradient at the end, relative to the first.
        max_evaluations: passes over the data before giving up.
    """
    began = time.perf_counter()
    smaller = problem.smaller() if first is None else None
    answer, passes, _ = _rough(smaller, start, max_evaluations) if smaller else (None, 0.0, 0.0)
    search = _Search(problem, start, answer=answer, memory=memory)
    if problem.rounding > TRUSTED * (first or search.first) and problem.refine():
        passes += search.passes
        search = _Search(problem, start, answer=answer, memory=memory)
    search.passes += passes
    if first is None:
        first = search.first
    goal = max(tolerance * first, NEGLIGIBLE)
    # What is read may be off by the rounding, so it must stay below the goal by as much.
    search.until(max(goal - problem.rounding, problem.rounding), max_evaluations)
    if goal < 2 * problem.rounding and problem.refine():
        search.look_again()
    goal -= problem.rounding
    search.until(goal, max_evaluations)
    relative = search.largest / first if first else 0.0
    passes = math.ceil(search.passes - 1e-9)
    if not search.largest <= goal:  # nor if it is NaN
        warnings.warn(
            f"not solved: after {passes} passes the largest entry of the gradient is {relative:.1e} "
            f"of its first value, {tolerance:.0e} was asked for; increase max_iter or ridge",
            ConvergenceWarning,
            stacklevel=2,
        )
    seconds = time.perf_counter() - began
    is_solved = search.largest <= goal
    return Solution(search.x, search.value, is_solved, passes, relative, seconds, search.ahead(), search.memory)


def _rough(problem: Problem, start: np.ndarray, limit: int) -> tuple[np.ndarray, float, float]:
    """About the answer of a part of the rows, by way of a smaller part of them; passes; the largest first gradient."""
    smaller, first, passes = problem.smaller(), 0.0, 0.0
    if smaller is not None:
        start, passes, first = _rough(smaller, start, limit)
    search = _Search(problem, start)
    first = first or search.largest
    search.until(ROUGH * first, limit)
    return search.x, passes + search.passes, first


class _Search:
    """The point reached so far, and steps that move it; it begins at `answer`, if that is better than the start.

    `first` is the largest entry of the gradient at the start.
    """

    def __init__(
        self, problem: Problem, start: np.ndarray, *, answer: np.ndarray | None = None, memory: Memory | None = None
    ) -> None:
        self.problem = problem
        self.passes = 0.0
        self.x = start
        self.memory = memory.copy() if memory else Memory()
        self._is_fresh = memory is None
        self._scaling: Scaling | Unscaled | None = None
        if answer is None:
            self.look_again()
            self.first = self.largest
        else:
            self._begin(start, answer)

    def _begin(self, start: np.ndarray, answer: np.ndarray) -> None:
        self.passes += self.problem.share
        here, there = self.problem.with_start(start, answer)
        self.value, self.gradient, self.blocks = *here, None
        self.first = self.largest
        if there[0] < self.value:
            self.x, (self.value, self.gradient, self.blocks) = answer, there

    def _look_at(self, x: np.ndarray, *, blocks: bool) -> tuple[float, np.ndarray, Blocks | None]:
        """Value, gradient and, if asked for and the problem has them, blocks at a point."""
        if blocks and self.problem.paired:
            return self.problem.with_blocks(x)
        return *self.problem.value_and_gradient(x), None

    def look_again(self) -> None:
        """Evaluate this point with its blocks: at first, or after the problem was refined."""
        self.passes += self.problem.share
        self.value, self.gradient, self.blocks = self._look_at(self.x, blocks=True)

    @property
    def largest(self) -> float:
        """Largest entry of the gradient."""
        return float(np.abs(self.gradient).max())

    def until(self, goal: float, limit: int) -> None:
        """Rounds of steps until the gradient reaches the goal, progress ends or `limit` passes are used."""
        limit_here = limit * self.problem.share
        while self.largest > goal and self.passes < limit_here:
            before = self.value, self.largest
            if self.problem.paired and self.blocks is None:
                self.look_again()
            self._round(goal, limit_here)
            is_slow = self.value > before[0] - SMALL_CHANGE * abs(before[0]) and self.largest > 0.5 * before[1]
            if is_slow and self.largest > goal and self.problem.refine():
                self.look_again()
            elif not (self.value < before[0] or self.largest < before[1]):
                break

    def _round(self, goal: float, limit: float) -> None:
        """Steps of L-BFGS in one set of variables; the first ones go by the memory that was given, if one was."""
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
            # Without scaling nothing is known about the length of the first step.
            size = 1.0 if is_scaled or len(self.memory) else min(1.0, 1 / float(np.linalg.norm(slopes)))
            taken = self._step(scaling.step(direction), size, goal, limit, end)
            if taken is None:
                break
            self.memory.add(taken * direction, scaling.gradient(self.gradient) - slopes)

    def ahead(self) -> np.ndarray:
        """Where the next step would go; here, if nothing is known of the curvature."""
        scaling = self._scaling or (Scaling(self.blocks, self.gradient) if self.blocks else None)
        if scaling is None:
            return self.x
        return np.asarray(self.x + scaling.step(self.memory.direction(scaling.gradient(self.gradient))))

    def _step(self, direction: np.ndarray, size: float, goal: float, limit: float, end: float) -> float | None:
        """Go some way along a direction; returns how far, or None if no acceptable point was found.

        Along a line the slope of a convex function only grows: points are too short, too far, or good. The last pass
        of a round, at `end`, gives the blocks for the next one.
        """
        self.blocks = None
        slope = float(self.gradient @ direction)
        short, far = (0.0, slope), (math.inf, math.nan)
        while self.passes < limit and far[0] - short[0] > 1e-12:
            self.passes += self.problem.share
            x = self.x + size * direction
            value, gradient, blocks = self._look_at(x, blocks=self.passes >= end - 1e-9)
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
            size = _between(short, far)
        return None


def _between(short: tuple[float, float], far: tuple[float, float]) -> float:
    """Where to look next: where a straight line through both slopes is 0, well inside; beyond, if none is too far."""
    if far[0] == math.inf:
        return 4 * short[0]
    width = far[0] - short[0]
    rise = far[1] - short[1]
    guess = -short[1] / rise if rise > 0 else 0.5
    return short[0] + width * min(max(guess, 0.1), 0.9)
