"""The curvature that a quasi-Newton step uses: the 2x2 blocks of the classes, and the L-BFGS pairs of earlier steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

MEMORY = 20  # pairs
TINY = 1e-300


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

    def _stretched(self, v: np.ndarray) -> np.ndarray:
        return np.asarray(v + self._stretch * (self._direction @ v) * self._direction)

    def step(self, v: np.ndarray) -> np.ndarray:
        """The step in x of a step in v."""
        first, second = np.split(self._stretched(v), 2)
        b = second / self.second
        return np.concatenate([(first - self.cross * b) / self.first, b])

    def gradient(self, g: np.ndarray) -> np.ndarray:
        """The gradient with respect to v of a gradient with respect to x."""
        first, second = np.split(g, 2)
        a = first / self.first
        return self._stretched(np.concatenate([a, (second - self.cross * a) / self.second]))


class Unscaled:
    """The variables without a preconditioner."""

    is_far = False

    def step(self, v: np.ndarray) -> np.ndarray:
        return v

    def gradient(self, g: np.ndarray) -> np.ndarray:
        return g


class Memory:
    """L-BFGS: pairs of steps and changes of the gradient (Nocedal 1980)."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=MEMORY)

    def __len__(self) -> int:
        return len(self._pairs)

    def copy(self) -> Memory:
        """A copy to which pairs can be added."""
        other = Memory()
        other._pairs.extend(self._pairs)
        return other

    def add(self, step: np.ndarray, change: np.ndarray) -> None:
        curvature = float(step @ change)
        if curvature > 1e-12 * float(np.linalg.norm(step) * np.linalg.norm(change)):
            self._pairs.append((step, change, curvature))

    def direction(self, gradient: np.ndarray) -> np.ndarray:
        """Minus the approximate inverse Hessian times the gradient."""
        d, factors = -gradient, []
        for step, change, curvature in reversed(self._pairs):
            factors.append(float(step @ d) / curvature)
            d = d - factors[-1] * change
        if self._pairs:
            _, change, curvature = self._pairs[-1]
            d = d * (curvature / float(change @ change))
        for (step, change, curvature), factor in zip(self._pairs, reversed(factors), strict=True):
            d = d + (factor - float(change @ d) / curvature) * step
        return d
