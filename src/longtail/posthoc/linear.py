"""A linear head on stored features: weighted cross-entropy and a quadratic penalty, in preconditioned variables.

    minimise  sum_i u_i CE(A r_i, y_i) + tr(A P A') / 2     over A (K, D + 1),  r_i = [f_i - g, 1]

g is the mean of the class means. At A = 0 the Hessian is the same for every class, M / K + P with M the second
moments of r. The minimiser works in variables X with A = X L^-1 and L L' = M / K + P, in which that Hessian is the
identity: a tenth of the passes that the head itself needs, and the same optimum. Large problems are worked in float32
and summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import cholesky, solve_triangular
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.class_statistics import ClassStatistics
from longtail.posthoc.solver import Problem

SMALL_PROBLEM = 1 << 22  # features; up to this number float64 is as fast
SINGLE_PRECISION = 1e-5  # a share of the gradient that float32 numbers still show


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


class ManyHeads:
    """Linear heads on the same features, applied by one product."""

    def __init__(self, heads: Sequence[LinearHead]) -> None:
        self.number = len(heads)
        parts = (np.concatenate([getattr(head, name) for head in heads]) for name in ("weight", "bias"))
        self._weight, self._bias = (torch.from_numpy(part) for part in parts)

    def scores(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Scores (S, K, B) of features (B, D) in a type."""
        if self._weight.dtype != dtype:
            self._weight, self._bias = self._weight.to(dtype), self._bias.to(dtype)
        together = torch.addmm(self._bias.unsqueeze(1), self._weight, features.to(dtype).T)
        return together.view(self.number, -1, len(features))


class LinearProblem(Problem):
    """The problem above in the variables X (K, D + 1), as one vector; 0 is the head without an opinion.

    Args:
        features: (N, D).
        labels: (N,) int64.
        sample_weights: (N,) float64, summing to 1.
        statistics: of these features; only the passes depend on how well they fit.
        penalty: P (D + 1, D + 1).
        exact: work in float64, whatever the size.
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
        """The head on features as they are."""
        matrix = self.matrix(x)
        return LinearHead(matrix[:, :-1], matrix[:, -1] - matrix[:, :-1] @ self.centre.numpy())

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        matrix = self.matrix(x)
        weight, bias = (torch.from_numpy(part).to(self.dtype) for part in (matrix[:, :-1], matrix[:, -1]))
        totals = torch.zeros(1 + matrix.size, dtype=torch.float64)  # one exchange between processes
        value, sums = totals[:1], totals[1:].view(matrix.shape)
        centre = self.centre.to(self.dtype)
        for rows, chunk in self.rows.chunks(self.first, self.last):
            features, labels, weights = chunk.to(self.dtype) - centre, self.labels[rows], self.sample_weights[rows]
            log_shares = F.log_softmax(F.linear(features, weight, bias), 1)
            value -= (weights * log_shares.gather(1, labels.unsqueeze(1)).squeeze(1)).sum()
            error = log_shares.exp_()
            error[torch.arange(len(labels)), labels] -= 1
            error *= weights.to(self.dtype).unsqueeze(1)
            sums[:, :-1] += error.T @ features
            sums[:, -1] += error.sum(0)
        self.world.sum(totals)
        pull = matrix @ self.penalty
        gradient = (sums.numpy() + pull) @ self.inverse.T
        return float(value) + 0.5 * float((matrix * pull).sum()), gradient.ravel()


def plain_penalty(ridge: float, statistics: ClassStatistics) -> np.ndarray:
    """P for ridge * (|W|^2 + |b|^2) / 2 of the head on features as they are."""
    shift = np.eye(len(statistics.centre) + 1)
    shift[:-1, -1] = -statistics.centre
    return ridge * shift @ shift.T
