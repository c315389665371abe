"""L-BFGS in variables that are scaled by the 2x2 blocks of the Hessian, with a line search."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from longtail.posthoc.solver import Problem

Memory = deque[tuple[np.ndarray, np.ndarray, float]]  # steps, changes of the gradient, their products

MEMORY = 20  # the latest steps that are kept
TINY = 1e-300
FAR_ROUND, ROUND = 4, 10  # passes before the blocks are computed again, far from the optimum and near it
SMALL_CHANGE = 1e-6  # relative changes of the value below this are computed from the gradient
DECREASE, FLATTER = 1e-4, 0.9  # Wolfe's conditions on a step: the value falls, the slope gets smaller


@dataclass(frozen=True)
class Blocks:
    """The 2x2 diagonal blocks of a Hessian over [a, b], one pair (a_j, b_j) per class.

    Args:
        aa, ab, bb: (K,) entries of the blocks.
        reach: (K,) longest step, in the metric of the block, over which the block approximates the curvature;
            infinite for a quadratic problem.
        flat: a direction (2K,) in which the curvature is much smaller than that of the blocks, if there is one.
        flat_curvature: its second derivative along `flat`, per unit of length squared.
    """

    aa: np.ndarray
    ab: np.ndarray
    bb: np.ndarray
    reach: np.ndarray
    flat: np.ndarray | None = None
    flat_curvature: float = 0.0


class Scaling:
    """Preconditioned variables v: x = origin + step(v).

    Every block is the identity there (x = L^-T v for block = L L^T), with two exceptions: a class whose Newton step
    would go beyond its reach is scaled as if it were steeper, and the flat direction is stretched.
    """

    def __init__(self, blocks: Blocks, gradient: np.ndarray) -> None:
        self.first = np.sqrt(np.maximum(blocks.aa, TINY))
        self.cross = blocks.ab / self.first
        # A nearly singular block keeps a small second pivot.
        self.second = np.sqrt(np.maximum(blocks.bb - self.cross**2, np.maximum(1e-12 * blocks.bb, TINY)))
        self._direction, self._stretch = np.zeros(len(gradient)), 0.0
        newton = np.hypot(*np.split(self.gradient(gradient), 2))
        excess = newton / blocks.reach
        self.is_far = bool(np.median(excess) > 0.3)
        steeper = np.sqrt(np.maximum(excess, 1.0))
        self.first, self.cross, self.second = self.first * steeper, self.cross * steeper, self.second * steeper
        if blocks.flat is not None and blocks.flat_curvature > 0:
            a, b = np.split(blocks.flat, 2)
            seen = np.concatenate([self.first * a + self.cross * b, self.second * b])
            length = float(np.linalg.norm(seen))
            self._direction = seen / length
            self._stretch = length / np.sqrt(blocks.flat_curvature * float(blocks.flat @ blocks.flat)) - 1

    def step(self, v: np.ndarray) -> np.ndarray:
        """The step in x of a step in v."""
        first, second = np.split(v + self._stretch * (self._direction @ v) * self._direction, 2)
        b = second / self.second
        return np.concatenate([(first - self.cross * b) / self.first, b])

    def gradient(self, g: np.ndarray) -> np.ndarray:
        """The gradient with respect to v of a gradient with respect to x."""
        first, second = np.split(g, 2)
        a = first / self.first
        v = np.concatenate([a, (second - self.cross * a) / self.second])
        return np.asarray(v + self._stretch * (self._direction @ v) * self._direction)


def quasi_newton(memory: Memory, gradient: np.ndarray) -> np.ndarray:
    """Minus the approximate inverse Hessian of L-BFGS (Nocedal 1980) times the gradient."""
    d, factors = -gradient, []
    for step, change, curvature in reversed(memory):
        factors.append(float(step @ d) / curvature)
        d = d - factors[-1] * change
    if memory:
        _, change, curvature = memory[-1]
        d = d * (curvature / float(change @ change))
    for (step, change, curvature), factor in zip(memory, reversed(factors), strict=True):
        d = d + (factor - float(change @ d) / curvature) * step
    return d


class Point(NamedTuple):
    """A point, the value and gradient there and, if they were computed, the blocks of the Hessian."""

    x: np.ndarray
    value: float
    gradient: np.ndarray
    blocks: Blocks | None

    @property
    def largest(self) -> float:
        """Largest entry of the gradient."""
        return float(np.abs(self.gradient).max())


class Search:
    """The current point, and steps that move it; it begins at `guess`, if the value is lower there than at the start.

    `first` is the largest entry of the gradient at the start.
    """

    def __init__(
        self,
        problem: Problem,
        start: np.ndarray,
        *,
        guess: np.ndarray | None = None,
        memory: Memory | None = None,
        held: np.ndarray | None = None,
    ) -> None:
        self.problem = problem
        self.held = held
        self.passes = 0.0
        self.memory = Memory(memory or (), MEMORY)
        self._keep_memory = memory is not None
        self._scaling: Scaling | None = None
        if guess is None:
            self.point = self.evaluate(start, blocks=True)
            self.first = self.point.largest
            return
        self.passes += problem.share
        (at_start, at_guess), there = problem.with_blocks(start, guess)
        self.point = Point(start, *at_start, None)
        self.first = self.point.largest
        if at_guess[0] < self.point.value:
            self.point = Point(guess, *at_guess, there)

    def evaluate(self, x: np.ndarray, *, blocks: bool) -> Point:
        """Value, gradient and, if asked for and the problem has them, blocks at a point; one pass."""
        self.passes += self.problem.share
        if not (blocks and self.problem.paired):
            point = Point(x, *self.problem.value_and_gradient(x), None)
        else:
            ((value, gradient),), there = self.problem.with_blocks(x)
            point = Point(x, value, gradient, there)
        if self.held is None:
            return point
        gradient = np.where(np.append(self.held, np.zeros_like(self.held)), 0.0, point.gradient)
        if point.blocks is None:
            return point._replace(gradient=gradient)
        aa, ab = np.where(self.held, 1.0, point.blocks.aa), np.where(self.held, 0.0, point.blocks.ab)
        return point._replace(gradient=gradient, blocks=replace(point.blocks, aa=aa, ab=ab))

    def until(self, goal: float, limit: int) -> None:
        """Rounds of steps until the gradient reaches the goal, progress stops or `limit` passes are used."""
        limit_here = limit * self.problem.share
        while self.point.largest > goal and self.passes < limit_here:
            before = self.point
            if self.problem.paired and self.point.blocks is None:
                self.point = self.evaluate(self.point.x, blocks=True)
            self._round(goal, limit_here)
            after, fall = self.point, SMALL_CHANGE * abs(before.value)
            is_slow = after.value > before.value - fall and after.largest > 0.5 * before.largest
            if is_slow and after.largest > goal and self.problem.refine():
                self.point = self.evaluate(after.x, blocks=True)
            elif not (after.value < before.value or after.largest < before.largest):
                break

    def _round(self, goal: float, limit: float) -> None:
        """Steps of L-BFGS in one set of variables; the first round uses the given memory, if there is one."""
        blocks = self.point.blocks
        self._scaling = scaling = Scaling(blocks, self.point.gradient) if blocks else None
        is_far = scaling is not None and scaling.is_far and not self._keep_memory
        end = min(limit, self.passes + (FAR_ROUND if is_far else ROUND if blocks else math.inf) * self.problem.share)
        if not self._keep_memory:
            self.memory.clear()
        self._keep_memory = False
        while self.point.largest > goal and self.passes < end:
            slopes = scaling.gradient(self.point.gradient) if scaling else self.point.gradient
            direction = quasi_newton(self.memory, slopes)
            if not slopes @ direction < 0:
                self.memory.clear()
                direction = -slopes
            # Without blocks, nothing determines the length of the first step.
            size = 1.0 if blocks or self.memory else min(1.0, 1 / float(np.linalg.norm(slopes)))
            taken = self._step(scaling.step(direction) if scaling else direction, size, goal, limit, end)
            if taken is None:
                break
            new_slopes = scaling.gradient(self.point.gradient) if scaling else self.point.gradient
            step, change = taken * direction, new_slopes - slopes
            curvature = float(step @ change)
            if curvature > 1e-12 * float(np.linalg.norm(step) * np.linalg.norm(change)):
                self.memory.append((step, change, curvature))

    def ahead(self) -> np.ndarray:
        """Where the next step would go; the current point, if there are no blocks."""
        point = self.point
        scaling = self._scaling or (Scaling(point.blocks, point.gradient) if point.blocks else None)
        if scaling is None:
            return point.x
        return np.asarray(point.x + scaling.step(quasi_newton(self.memory, scaling.gradient(point.gradient))))

    def _step(self, direction: np.ndarray, size: float, goal: float, limit: float, end: float) -> float | None:
        """Line search along a direction; returns the step size, or None if no point is acceptable.

        Along a line the slope of a convex function only grows: steps are too short, too long, or good. The last pass
        of a round, at `end`, gives the blocks for the next one.
        """
        self.point = here = self.point._replace(blocks=None)
        slope = float(here.gradient @ direction)
        short, far = (0.0, slope), (math.inf, math.nan)
        while self.passes < limit and far[0] - short[0] > 1e-12:
            is_last = self.passes + self.problem.share >= end - 1e-9
            there = self.evaluate(here.x + size * direction, blocks=is_last)
            new_slope = float(there.gradient @ direction)
            change = there.value - here.value
            if abs(change) < SMALL_CHANGE * abs(there.value):
                change = 0.5 * size * (slope + new_slope)
            is_low = change <= DECREASE * size * slope
            if is_low and (abs(new_slope) <= -FLATTER * slope or there.largest <= goal):
                self.point = there
                return size
            if is_low and new_slope < 0:
                short = (size, new_slope)
            else:
                far = (size, new_slope)
            if far[0] == math.inf:
                size = 4 * short[0]
                continue
            # Where a line through both slopes is 0, well inside.
            rise = far[1] - short[1]
            guess = -short[1] / rise if rise > 0 else 0.5
            size = short[0] + (far[0] - short[0]) * min(max(guess, 0.1), 0.9)
        return None
