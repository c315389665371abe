"""One minimiser for every convex post-hoc problem: few passes over the data, to the optimum.

A problem gives its value, its gradient and, where it has them, the 2x2 diagonal blocks of its
Hessian (one per class). SciPy's L-BFGS-B does the steps; around it stand three things that make
the number of passes small, whatever the class sizes:

- rounds: a short one in the given variables, then rounds in variables scaled by the blocks of the
  Hessian at the point reached, where all classes, head or tail, are equally easy;
- near the optimum the change of the value drowns in float32 rounding while the gradient does not,
  so small changes of the value are taken from the gradient (trapezoid rule);
- "solved" means that the largest entry of the gradient fell to a given share of that at the start.

A problem that sums over several processes does so in its own methods; as all processes see the
same sums, they take the same steps.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning

FIRST_ROUND = 0.1  # the round without scaling ends when the gradient fell to this share
FIRST_EVALUATIONS = 15
MEMORY = 20
NEGLIGIBLE = 1e-13  # a gradient that is rounding of a loss of about 1: there is nothing to move
SMALL_CHANGE = 1e-6  # relative changes of the value below this are taken from the gradient


class Problem(ABC):
    """A smooth convex function of a vector; `paired` if that is [a, b] with one pair per class."""

    paired = False

    @abstractmethod
    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """One pass over the data."""

    def refine(self) -> bool:
        """Work more precisely from now on; False if that is not possible."""
        return False

    def blocks(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Entries (aa, ab, bb) of each pair's block of the Hessian; asked only of paired problems."""
        raise TypeError(f"{type(self).__name__} is not paired")


@dataclass(frozen=True)
class Solution:
    """Where the minimiser stopped, and how good that is.

    `gradient` is its largest entry relative to the reference; None where it was not computed.
    """

    x: np.ndarray
    value: float
    converged: bool
    evaluations: int
    gradient: float | None
    seconds: float


def minimise(
    problem: Problem,
    start: np.ndarray,
    *,
    reference: np.ndarray | None = None,
    tolerance: float = 1e-5,
    max_evaluations: int = 500,
) -> Solution:
    """Minimise a problem from `start`; warns loudly if the tolerance is not reached.

    Args:
        problem: what to minimise.
        start: first point.
        reference: point whose gradient the tolerance is a share of (default: the start). If there is
            one, the start counts as good already and the round without scaling is left out.
        tolerance: largest entry of the gradient at the end, relative to the reference.
        max_evaluations: passes over the data before giving up.
    """
    began = time.perf_counter()
    search = _Search(problem, start, max_evaluations)
    first = search.gradient if reference is None else np.abs(problem.value_and_gradient(reference)[1]).max()
    goal = max(tolerance * float(first), NEGLIGIBLE)
    if not problem.paired:
        search.run(goal, max_evaluations)
    elif reference is None:
        search.run(max(goal, FIRST_ROUND * float(first)), FIRST_EVALUATIONS)
    while problem.paired and search.gradient > goal and search.left > 0:
        search.run(goal, max_evaluations, _Scaling(*problem.blocks(search.x)))
        if not search.advanced:
            if not problem.refine():
                break
            search.move_to(search.x)
    relative = search.gradient / float(first) if first else 0.0
    if not search.gradient <= goal:  # nor if it is NaN
        warnings.warn(
            f"not solved: after {search.evaluations} passes the largest entry of the gradient is {relative:.1e} "
            f"of its first value, {tolerance:.0e} was asked for; increase max_iter or ridge",
            ConvergenceWarning,
            stacklevel=2,
        )
    seconds = time.perf_counter() - began
    return Solution(search.x, search.value, search.gradient <= goal, search.evaluations, relative, seconds)


class _Scaling:
    """Variables in which every 2x2 block of the Hessian is the identity: x = L^-T v for block = L L^T."""

    def __init__(self, aa: np.ndarray, ab: np.ndarray, bb: np.ndarray) -> None:
        self.first = np.sqrt(aa)
        self.cross = ab / self.first
        # A class whose two directions look alike keeps a little of the second.
        self.second = np.sqrt(np.maximum(bb - self.cross**2, 1e-12 * bb))

    def step(self, v: np.ndarray) -> np.ndarray:
        b = v[len(v) // 2 :] / self.second
        a = (v[: len(v) // 2] - self.cross * b) / self.first
        return np.concatenate([a, b])

    def gradient(self, g: np.ndarray) -> np.ndarray:
        a = g[: len(g) // 2] / self.first
        b = (g[len(g) // 2 :] - self.cross * a) / self.second
        return np.concatenate([a, b])


class _Search:
    """The point reached so far, and rounds of L-BFGS-B that move it."""

    def __init__(self, problem: Problem, start: np.ndarray, max_evaluations: int) -> None:
        self.problem = problem
        self.left = max_evaluations
        self.evaluations = 0
        self.advanced = True
        self.move_to(start)

    def move_to(self, x: np.ndarray) -> None:
        """Evaluate a point and go on from it."""
        self._accepted = self._latest = (x, *self._evaluate(x))

    @property
    def x(self) -> np.ndarray:
        return self._accepted[0]

    @property
    def value(self) -> float:
        return self._accepted[1]

    @property
    def gradient(self) -> float:
        """Largest entry of the gradient."""
        return float(np.abs(self._accepted[2]).max())

    def _evaluate(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        self.evaluations += 1
        self.left -= 1
        return self.problem.value_and_gradient(x)

    def run(self, goal: float, limit: int, scaling: _Scaling | None = None) -> None:
        """One round: until the gradient reaches the goal, progress ends or `limit` passes are used."""
        origin, before = self.x, (self.value, self.gradient)
        reported = self.value

        def function(v: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal reported
            x = origin + (scaling.step(v) if scaling else v)
            if np.any(v):
                last_x, last_value, last_gradient = self._latest
                value, gradient = self._evaluate(x)
                change = value - last_value
                if abs(change) < SMALL_CHANGE * abs(value):
                    change = 0.5 * float((gradient + last_gradient) @ (x - last_x))
                reported += change
                self._latest = (x, value, gradient)
            gradient = self._latest[2]
            return reported, scaling.gradient(gradient) if scaling else gradient

        def accept(intermediate_result: object) -> None:
            # SciPy calls this right after it evaluated the point that it accepts.
            self._accepted = self._latest
            if self.gradient <= goal:
                raise StopIteration

        self._latest = self._accepted
        passes = min(limit, self.left)
        options = {"maxcor": MEMORY, "maxfun": passes, "maxiter": passes, "ftol": 0.0, "gtol": 0.0}
        minimize(function, np.zeros_like(origin), jac=True, method="L-BFGS-B", callback=accept, options=options)
        self.advanced = self.value < before[0] or self.gradient < before[1]
