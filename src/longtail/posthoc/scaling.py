"""Confidence calibration that long-tailed methods are relatives of: temperature, vector, Platt scaling.

| method | logits become | numbers |
|---|---|---|
| temperature | z / T | 1 |
| vector | a_j z_j + b_j | 2K |
| Platt | a_j z_j + b_j, each class against the rest by a sigmoid | 2K |

Fit them on held-out outputs: logits of training images are overconfident. Vector scaling is MARC
with norms 1 and no class weights. All three are convex and solved to their optimum.

Papers: Guo et al., On Calibration of Modern Neural Networks, ICML 2017; Platt, Probabilistic Outputs
for Support Vector Machines, 1999.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longtail.outputs.rows import LogitRows
from longtail.posthoc.affine import AffineProblem
from longtail.posthoc.base import AffinePostHoc, FitResult
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import Problem, minimise

HOTTEST = 1000.0  # temperature


def _unweighted(data: FitData, ridge: float) -> AffineProblem:
    """The mean cross-entropy of rescaled and shifted logits."""
    size = len(data.labels)
    return AffineProblem(
        data.rows,
        data.labels,
        torch.full((size,), 1 / size, dtype=torch.float64),
        torch.ones(data.num_classes),
        ridge=ridge,
        centre=np.repeat([1.0, 0.0], data.num_classes),
        world=data.world,
    )


class _OneScale(Problem):
    """The same problem with one scale for all classes and no shifts."""

    def __init__(self, affine: AffineProblem) -> None:
        self.affine = affine
        self.classes = affine.rows.shape[1]

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.affine.value_and_gradient(np.repeat([x[0], 0.0], self.classes))
        return value, np.array([gradient[: self.classes].sum()])


class TemperatureScaling(AffinePostHoc):
    """One temperature for all classes, at most 1,000; predictions do not change, confidences do.

    Fitted attributes: `temperature_`, `scale_` (K,), `shift_` (K,), `result_`.
    """

    def __init__(self, *, tolerance: float = 1e-6, max_iter: int = 200) -> None:
        self.tolerance = tolerance
        self.max_iter = max_iter

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        problem = _OneScale(_unweighted(data, ridge=0.0))
        solution = minimise(problem, np.ones(1), tolerance=self.tolerance, max_evaluations=self.max_iter)
        # Logits that are worse than chance would ask for a negative one, which turns every decision around.
        scale = max(float(solution.x[0]), 1 / HOTTEST)
        self.temperature_ = 1 / scale
        self.scale_ = np.full(data.num_classes, scale)
        self.shift_ = np.zeros(data.num_classes)
        self.result_ = FitResult.of(solution)

    @property
    def n_parameters_(self) -> int:
        return 1


class VectorScaling(AffinePostHoc):
    """One scale and one shift per class.

    Args:
        ridge: pull towards the identity; a little fixes the direction that is free.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.

    Fitted attributes: `scale_` (K,), `shift_` (K,), `result_`.
    """

    def __init__(self, *, ridge: float = 1e-6, tolerance: float = 1e-5, max_iter: int = 500) -> None:
        self.ridge = ridge
        self.tolerance = tolerance
        self.max_iter = max_iter

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        identity = np.repeat([1.0, 0.0], data.num_classes)
        problem = _unweighted(data, self.ridge)
        solution = minimise(problem, identity, tolerance=self.tolerance, max_evaluations=self.max_iter)
        self.scale_, self.shift_ = np.split(solution.x, 2)
        self.result_ = FitResult.of(solution)

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.scale_)


class _OneVersusRest(Problem):
    """K logistic regressions on one number each: `sum_j mean_i BCE(sigmoid(a_j z_ij + b_j), t_ij)`."""

    paired = True

    def __init__(self, rows: LogitRows, labels: Tensor, ridge: float) -> None:
        self.rows = rows
        self.labels = labels
        self.ridge = ridge
        size, classes = rows.shape
        positives = torch.bincount(labels, minlength=classes).double()
        # Platt's targets: a little inside 0 and 1, so that a class that is told apart perfectly has a finite answer.
        self.high = (positives + 1) / (positives + 2)
        self.low = 1 / (size - positives + 2)

    def _parts(self, x: np.ndarray) -> list[tuple[Tensor, Tensor, Tensor]]:
        a, b = torch.from_numpy(x).chunk(2)
        parts = []
        for rows, logits in self.rows.chunks():
            own = torch.nn.functional.one_hot(self.labels[rows], len(a)).bool()
            targets = torch.where(own, self.high, self.low)
            parts.append((logits.double(), a * logits.double() + b, targets))
        return parts

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        identity = np.repeat([1.0, 0.0], len(x) // 2)
        value, gradient = 0.5 * self.ridge * float((x - identity) @ (x - identity)), self.ridge * (x - identity)
        size = self.rows.shape[0]
        for logits, scores, targets in self._parts(x):
            losses = torch.nn.functional.softplus(scores) - targets * scores
            value += float(losses.sum()) / size
            error = (scores.sigmoid() - targets) / size
            gradient = gradient + torch.cat([(error * logits).sum(0), error.sum(0)]).numpy()
        return value, gradient

    def blocks(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sums = torch.zeros(3, len(x) // 2, dtype=torch.float64)
        for logits, scores, _ in self._parts(x):
            curvature = scores.sigmoid() * (-scores).sigmoid() / self.rows.shape[0]
            for power in (0, 1, 2):
                sums[power] += (curvature * logits**power).sum(0)
        bb, ab, aa = sums.numpy()
        return aa + self.ridge, ab, bb + self.ridge


class PlattScaling(AffinePostHoc):
    """One sigmoid per class against the rest; probabilities are the sigmoids, made to sum to 1.

    Args:
        ridge: pull towards the identity.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.

    Fitted attributes: `scale_` (K,), `shift_` (K,), `result_`.
    """

    def __init__(self, *, ridge: float = 1e-8, tolerance: float = 1e-6, max_iter: int = 500) -> None:
        self.ridge = ridge
        self.tolerance = tolerance
        self.max_iter = max_iter

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        identity = np.repeat([1.0, 0.0], data.num_classes)
        problem = _OneVersusRest(data.rows, data.labels, self.ridge)
        solution = minimise(problem, identity, tolerance=self.tolerance, max_evaluations=self.max_iter)
        self.scale_, self.shift_ = np.split(solution.x, 2)
        self.result_ = FitResult.of(solution)

    def _probabilities(self, repaired: Tensor) -> Tensor:
        # In logarithms, so that a sample far from every class still sums to 1.
        return torch.nn.functional.logsigmoid(repaired).softmax(1)

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.scale_)
