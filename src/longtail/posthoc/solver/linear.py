"""A linear head on stored features: weighted cross-entropy and a quadratic penalty, in preconditioned variables.

    minimise  sum_i u_i CE(A r_i, y_i) + tr(A P A') / 2     over A (K, D + 1),  r_i = [f_i - g, 1]

g is the mean of the class means. At A = 0 the Hessian is the same for every class, M / K + P with M the second
moments of r. The minimiser works in variables X with A = X L^-1 and L L' = M / K + P, in which that Hessian is the
identity: a tenth of the passes, and the same optimum. Large problems are computed in float32 and summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import cholesky, solve_triangular
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.solver import Problem

SMALL_PROBLEM = 1 << 22  # features; up to this number float64 is as fast
SINGLE_PRECISION = 1e-5  # relative gradient that float32 still resolves
SHRINKAGE = 0.1  # of the covariance towards a multiple of the identity


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """(N,) float64: samples of one class share 1 / K, what class-balanced sampling draws on average."""
    counts = torch.bincount(labels, minlength=num_classes).double()
    return 1 / (num_classes * counts[labels])


@dataclass(frozen=True)
class ClassStatistics:
    """Means and covariance of features (N, D) of K classes, in float64.

    Args:
        means: (K, D).
        covariance: (D, D) within classes, every class with the same weight, shrunk towards a multiple of the identity.
    """

    means: np.ndarray
    covariance: np.ndarray

    @property
    def centre(self) -> np.ndarray:
        """(D,) mean of the class means."""
        return np.asarray(self.means.mean(0))

    def second_moments(self) -> np.ndarray:
        """(D + 1, D + 1) of [features - centre, 1], every class with the same weight."""
        between = self.means - self.centre
        moments = np.zeros((len(self.centre) + 1,) * 2)
        moments[:-1, :-1] = self.covariance + between.T @ between / len(between)
        moments[-1, -1] = 1.0
        return moments


def class_statistics(
    features: Array, labels: Tensor, num_classes: int, world: World = SINGLE_PROCESS
) -> ClassStatistics:
    """Means and covariance of features (N, D); the processes of `world` each read their share, twice.

    The covariance is `(1 - s) S + s tr(S) / D I` with s = 0.1, where S weighs a sample by 1 / n_c.
    """
    rows = LogitRows(features)
    size, width = rows.shape
    first, last = world.share(size)
    counts = torch.bincount(labels, minlength=num_classes).double()
    sums = torch.zeros(num_classes, width, dtype=torch.float64)
    for where, chunk in rows.chunks(first, last):
        sums.index_add_(0, labels[where], chunk.double())
    means = world.sum(sums) / counts.unsqueeze(1)
    scatter = torch.zeros(width, width, dtype=torch.float64)
    weights = 1 / (num_classes * counts)
    for where, chunk in rows.chunks(first, last):
        codes = labels[where]
        residual = chunk.double() - means[codes]
        scatter.addmm_((residual * weights[codes].unsqueeze(1)).T, residual)
    covariance = world.sum(scatter).numpy()
    spread = float(np.trace(covariance)) / width
    # Features that do not vary within classes get the identity.
    identity = (SHRINKAGE * spread if spread > 0 else 1.0) * np.eye(width)
    return ClassStatistics(means.numpy(), (1 - SHRINKAGE) * covariance + identity)


@dataclass(frozen=True)
class LinearHead:
    """Weight (K, D) and bias (K,), float64."""

    weight: np.ndarray
    bias: np.ndarray

    def scores(self, features: Tensor) -> Tensor:
        """Scores (N, K) of features (N, D), in their type."""
        return F.linear(features, torch.from_numpy(self.weight).to(features), torch.from_numpy(self.bias).to(features))

    def centred(self) -> LinearHead:
        """A head with the same predictions whose scores have mean 0 over the classes."""
        return LinearHead(self.weight - self.weight.mean(0), self.bias - self.bias.mean())

    def times(self, factor: float) -> LinearHead:
        return LinearHead(factor * self.weight, factor * self.bias)


class StackedHeads:
    """Linear heads on the same features, applied by one matrix product."""

    def __init__(self, heads: Sequence[LinearHead]) -> None:
        self.number = len(heads)
        self._weight = torch.from_numpy(np.concatenate([head.weight for head in heads]))
        self._bias = torch.from_numpy(np.concatenate([head.bias for head in heads]))

    def scores(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Scores (S, K, B) of features (B, D) in a type."""
        if self._weight.dtype != dtype:
            self._weight, self._bias = self._weight.to(dtype), self._bias.to(dtype)
        stacked = torch.addmm(self._bias.unsqueeze(1), self._weight, features.to(dtype).T)
        return stacked.view(self.number, -1, len(features))


class LinearProblem(Problem):
    """The problem above in the variables X (K, D + 1), as one vector; 0 gives every class the same score.

    Args:
        features: (N, D).
        labels: (N,) int64.
        sample_weights: (N,) float64, summing to 1.
        statistics: of these features; they decide the preconditioner, not the optimum.
        penalty: P (D + 1, D + 1).
        exact: compute in float64, whatever the size.
        world: processes that share the rows.
    """

    def __init__(
        self,
        features: Array,
        labels: Tensor,
        sample_weights: Tensor,
        statistics: ClassStatistics,
        penalty: np.ndarray,
        *,
        exact: bool = False,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.rows = LogitRows(features)
        self.labels = labels
        self.sample_weights = sample_weights
        self.penalty = penalty
        self.world = world
        self.classes, self.width = statistics.means.shape
        self.first, self.last = world.share(len(labels))
        small = self.rows.shape[0] * self.width <= SMALL_PROBLEM
        self.dtype = torch.float64 if small or exact else torch.float32
        self.centre = torch.from_numpy(statistics.centre)
        self.moments = statistics.second_moments()
        self.precondition(1 / self.classes)

    def precondition(self, curvature: float) -> None:
        """Choose the variables for a mean curvature of the cross-entropy per class (1 / K before it is measured)."""
        root = cholesky(curvature * self.moments + self.penalty, lower=True)
        self.root, self.inverse = root, solve_triangular(root, np.eye(self.width + 1), lower=True)

    @property
    def start(self) -> np.ndarray:
        return np.zeros(self.classes * (self.width + 1))

    def matrix(self, x: np.ndarray) -> np.ndarray:
        """A (K, D + 1) of the variables."""
        return np.asarray(x.reshape(self.classes, -1) @ self.inverse)

    def variables(self, matrix: np.ndarray) -> np.ndarray:
        """The variables of A (K, D + 1)."""
        return np.asarray((matrix @ self.root).ravel())

    def head(self, x: np.ndarray) -> LinearHead:
        """The head on the given (not centred) features."""
        matrix = self.matrix(x)
        return LinearHead(matrix[:, :-1], matrix[:, -1] - matrix[:, :-1] @ self.centre.numpy())

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        matrix = self.matrix(x)
        weight, bias = (torch.from_numpy(array).to(self.dtype) for array in (matrix[:, :-1], matrix[:, -1]))
        totals = torch.zeros(1 + matrix.size, dtype=torch.float64)  # one exchange between processes
        value, sums = totals[:1], totals[1:].view(matrix.shape)
        centre = self.centre.to(self.dtype)
        for rows, chunk in self.rows.chunks(self.first, self.last):
            features, labels, weights = chunk.to(self.dtype) - centre, self.labels[rows], self.sample_weights[rows]
            log_probabilities = F.log_softmax(F.linear(features, weight, bias), 1)
            value -= (weights * log_probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)).sum()
            error = log_probabilities.exp_()
            error[torch.arange(len(labels)), labels] -= 1
            error *= weights.to(self.dtype).unsqueeze(1)
            sums[:, :-1] += error.T @ features
            sums[:, -1] += error.sum(0)
        self.world.sum(totals)
        pull = matrix @ self.penalty
        gradient = (sums.numpy() + pull) @ self.inverse.T
        return float(value) + 0.5 * float((matrix * pull).sum()), gradient.ravel()


def plain_penalty(ridge: float, statistics: ClassStatistics) -> np.ndarray:
    """P for ridge * (|W|^2 + |b|^2) / 2 of the head on the given features."""
    shift = np.eye(len(statistics.centre) + 1)
    shift[:-1, -1] = -statistics.centre
    return ridge * shift @ shift.T
