"""What methods with one scale and one shift per class share: a convex problem, solved from the unchanged classifier."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.result import FitResult
from longtail.posthoc.settings import check_exact
from longtail.posthoc.solver import Problem, minimise


def identity(num_classes: int) -> np.ndarray:
    """(2K,) scales 1, then shifts 0: the unchanged classifier.

    >>> identity(2).tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    return np.repeat([1.0, 0.0], num_classes)


class ScaleAndShift(PostHoc):
    """Methods that solve for [scale, shift]; subclasses give the problem and have these three settings.

    Args:
        ridge: weight decay.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.
    """

    ridge: float
    tolerance: float
    max_iter: int

    scale_: np.ndarray
    shift_: np.ndarray

    @abstractmethod
    def _problem(self, data: FitData) -> Problem:
        """What is minimised over [scale, shift] (2K,)."""

    def check_settings(self) -> None:
        check_exact(self.ridge, self.tolerance, self.max_iter)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        start = identity(data.num_classes)
        solution = minimise(self._problem(data), start, tolerance=self.tolerance, max_evaluations=self.max_iter)
        self.scale_, self.shift_ = np.split(solution.x, 2)
        self.result_ = FitResult.of(solution)

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.scale_)
