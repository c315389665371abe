"""Confidence calibration that long-tailed methods are relatives of: temperature, vector and matrix scaling.

| method | logits become | numbers |
|---|---|---|
| temperature | z / T | 1 |
| vector | a_j z_j + b_j | 2K |
| matrix | A z + b | K^2 + K |

Fit them on held-out outputs: a network is overconfident on its training images. Vector scaling is MARC
with norms 1 and no class weights, pulled to temperature scaling. All are convex and solved to their optimum.

Papers: Guo et al., On Calibration of Modern Neural Networks, ICML 2017; Kull et al., Beyond
temperature scaling, NeurIPS 2019 (ODIR: the off-diagonal entries and the intercept of matrix scaling
are kept small by a ridge of their own).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import number
from longtail.posthoc.affine import AffinePostHoc, ScaleAndShift, check_numbers, identity
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import FitResult, Problem, Solution, minimise
from longtail.posthoc.solver.affine import SMALLEST_SCALE, AffineProblem


def _unweighted(data: FitData, ridge: float = 0.0) -> AffineProblem:
    """The mean cross-entropy of rescaled and shifted logits, with a ridge per number."""
    size = len(data.labels)
    return AffineProblem(
        data.rows,
        data.labels,
        torch.full((size,), 1 / size, dtype=torch.float64),
        torch.ones(data.num_classes),
        ridge=ridge,
        centre=identity(data.num_classes),
        world=data.world,
    )


class _OneScale(Problem):
    """The same problem with one scale for all classes and no shifts."""

    def __init__(self, affine: AffineProblem) -> None:
        self.affine = affine
        self.classes = affine.rows.shape[1]
        self.unit = affine.unit

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.affine.value_and_gradient(np.repeat([x[0], 0.0], self.classes))
        return value, np.array([gradient[: self.classes].sum()])


def _common_scale(affine: AffineProblem, tolerance: float, max_iter: int) -> tuple[float, Solution]:
    """The best scale for all classes, without shifts."""
    solution = minimise(_OneScale(affine), np.ones(1), tolerance=tolerance, max_evaluations=max_iter)
    # Logits worse than chance would give a negative temperature, which would reverse every prediction.
    return max(float(solution.x[0]), SMALLEST_SCALE), solution


class TemperatureScaling(AffinePostHoc):
    """One temperature for all classes, at most 1,000; predictions do not change, confidences do.

    Fitted attributes: `temperature_`, `scale_` (K,), `shift_` (K,), `result_`.
    """

    fitted_on_unseen = True
    needs_every_class = False

    def __init__(self, *, tolerance: float = 1e-6, max_iter: int = 200) -> None:
        self.tolerance = tolerance
        self.max_iter = max_iter

    def check_settings(self) -> None:
        check_numbers(self)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        scale, solution = _common_scale(_unweighted(data), self.tolerance, self.max_iter)
        self.temperature_ = 1 / scale
        self.scale_ = np.full(data.num_classes, scale)
        self.shift_ = np.zeros(data.num_classes)
        self.result_ = FitResult.of(solution)

    @property
    def n_parameters_(self) -> int:
        return 1


class VectorScaling(ScaleAndShift, AffinePostHoc):
    """One scale and one shift per class.

    Args:
        ridge: precision of a Gaussian prior of every scale around the best common one, and of every shift around 0. So
            a class with few samples stays near temperature scaling, and many samples outweigh it.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.

    Fitted attributes: `scale_` (K,), `shift_` (K,), `result_`.
    """

    fitted_on_unseen = True

    def __init__(self, *, ridge: float = 1.0, tolerance: float = 1e-5, max_iter: int = 500) -> None:
        self.ridge = ridge
        self.tolerance = tolerance
        self.max_iter = max_iter

    def _problem(self, data: FitData) -> AffineProblem:
        scale, _ = _common_scale(_unweighted(data), self.tolerance, self.max_iter)
        problem = _unweighted(data, self.ridge / len(data.labels))
        problem.centre = scale * identity(data.num_classes)
        return problem


class _MatrixProblem(Problem):
    """Mean cross-entropy of `A z + b` over x = [A, b], with ODIR's two ridges, streamed in chunks.

    The ridges are means: `off_diagonal / (2 K (K - 1)) * sum_{i != j} A_ij^2 + intercept / (2 K) * sum_j b_j^2`.
    """

    def __init__(self, data: FitData, off_diagonal: float, intercept: float) -> None:
        self.data = data
        classes = data.num_classes
        self.off_diagonal = (1 - np.eye(classes)) * off_diagonal / (classes * (classes - 1))
        self.intercept = intercept / classes
        self.first, self.last = data.world.share(len(data.labels))

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        classes = self.data.num_classes
        matrix, shift = torch.from_numpy(x[:-classes]).view(classes, classes), torch.from_numpy(x[-classes:])
        totals = torch.zeros(1 + len(x), dtype=torch.float64)
        value, gradient = totals[:1], totals[1:]
        by_matrix, by_shift = gradient[:-classes].view(classes, classes), gradient[-classes:]
        for rows, chunk in self.data.rows.chunks(self.first, self.last):
            logits, labels = chunk.double(), self.data.labels[rows]
            log_shares = F.log_softmax(F.linear(logits, matrix, shift), 1)
            value -= log_shares.gather(1, labels.unsqueeze(1)).sum()
            error = log_shares.exp_()
            error[torch.arange(len(labels)), labels] -= 1
            by_matrix += error.T @ logits
            by_shift += error.sum(0)
        self.data.world.sum(totals)
        totals /= len(self.data.labels)
        pull = np.concatenate([(self.off_diagonal * matrix.numpy()).ravel(), self.intercept * shift.numpy()])
        return float(value) + 0.5 * float(pull @ x), gradient.numpy() + pull


class MatrixScaling(PostHoc):
    """A whole matrix and a shift per class, its off-diagonal entries and shifts kept small (ODIR).

    K^2 + K numbers need many held-out images. The authors choose the two ridges by cross-validation; the
    defaults suit logits of a usual size.

    Args:
        off_diagonal: ridge on the mean square of the off-diagonal entries.
        intercept: ridge on the mean square of the shifts.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.

    Fitted attributes: `matrix_` (K, K), `shift_` (K,), `result_`.
    """

    fitted_on_unseen = True

    def __init__(
        self, *, off_diagonal: float = 0.1, intercept: float = 0.1, tolerance: float = 1e-5, max_iter: int = 500
    ) -> None:
        self.off_diagonal = off_diagonal
        self.intercept = intercept
        self.tolerance = tolerance
        self.max_iter = max_iter

    def check_settings(self) -> None:
        number("off_diagonal", self.off_diagonal, at_least=0)
        number("intercept", self.intercept, at_least=0)
        check_numbers(self)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        classes = data.num_classes
        problem = _MatrixProblem(data, self.off_diagonal, self.intercept)
        start = np.concatenate([np.eye(classes).ravel(), np.zeros(classes)])
        solution = minimise(problem, start, tolerance=self.tolerance, max_evaluations=self.max_iter)
        self.matrix_, self.shift_ = solution.x[:-classes].reshape(classes, classes), solution.x[-classes:]
        self.result_ = FitResult.of(solution)

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        matrix, shift = (torch.as_tensor(v).to(logits) for v in (self.matrix_, self.shift_))
        return F.linear(logits, matrix, shift)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        matrix, shift = torch.as_tensor(self.matrix_), torch.as_tensor(self.shift_)
        old = torch.zeros(len(weight)) if bias is None else bias.cpu()
        folded = matrix @ weight.cpu().double(), matrix @ old.double() + shift
        return folded[0].to(weight), folded[1].to(weight)

    @property
    def n_parameters_(self) -> int:
        return self.matrix_.size + self.shift_.size
