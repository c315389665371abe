"""Linear heads fitted on stored features: linear discriminant analysis, and a balanced one in its metric.

With class means m_k, their mean g and the covariance S within classes (see `class_statistics`):

    LDA:       score_k = (m_k - g)' S^-1 x - (m_k - g)' S^-1 (m_k + g) / 2
    balanced:  minimise sum_i w_i CE_i + 0.005 |W|^2 + 0.00005 |b|^2 over W, b on (x - g) S^(-1/2),
               w_i proportional to 1 / n_{y_i} and summing to 1

Papers: Fisher, The use of multiple measurements in taxonomic problems, 1936 (LDA).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.class_statistics import ClassStatistics
from longtail.posthoc.crt import LinearProblem, unpack
from longtail.posthoc.lws import balanced_weights
from longtail.posthoc.solver import Problem, Solution, minimise

WEIGHT_RIDGE, BIAS_RIDGE = 0.01, 1e-4


@dataclass(frozen=True)
class LinearHead:
    """Weight (K, D) and bias (K,), float64."""

    weight: np.ndarray
    bias: np.ndarray

    def scores(self, features: Tensor) -> Tensor:
        """Scores (N, K) of features (N, D), in their type."""
        return F.linear(features, torch.from_numpy(self.weight).to(features), torch.from_numpy(self.bias).to(features))

    def centred(self) -> LinearHead:
        """The same decisions: scores whose mean over classes is 0 for every sample."""
        return LinearHead(self.weight - self.weight.mean(0), self.bias - self.bias.mean())

    def times(self, factor: float) -> LinearHead:
        return LinearHead(factor * self.weight, factor * self.bias)


def lda_head(statistics: ClassStatistics) -> LinearHead:
    """Linear discriminant analysis with equal priors."""
    means, centre = statistics.means, statistics.centre
    weight = (means - centre) @ statistics.power(-1.0)
    return LinearHead(weight, -0.5 * (weight * (means + centre)).sum(1))


class _WhitenedProblem(Problem):
    """The balanced problem in x = [W, b] on whitened features; the features themselves are read as they are.

    `W (x - g) S^(-1/2) + b` is `V x + b - V g` with `V = W S^(-1/2)`, so only the head is transformed.
    """

    def __init__(self, plain: LinearProblem, root: np.ndarray, centre: np.ndarray) -> None:
        self.plain = plain
        self.root = root
        self.centre = centre

    def head(self, x: np.ndarray) -> LinearHead:
        """The head on features as they are."""
        whitened, bias = (part.numpy() for part in unpack(torch.from_numpy(x), self.plain.classes))
        weight = whitened @ self.root
        return LinearHead(weight, bias - weight @ self.centre)

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        head = self.head(x)
        value, gradient = self.plain.value_and_gradient(np.concatenate([head.weight.ravel(), head.bias]))
        by_weight, by_bias = (part.numpy() for part in unpack(torch.from_numpy(gradient), self.plain.classes))
        by_whitened = (by_weight - np.outer(by_bias, self.centre)) @ self.root
        ridge = np.full(len(x), WEIGHT_RIDGE)
        ridge[-self.plain.classes :] = BIAS_RIDGE
        return value + 0.5 * float((ridge * x) @ x), np.concatenate([by_whitened.ravel(), by_bias]) + ridge * x


def balanced_head(
    features: Array,
    labels: Tensor,
    statistics: ClassStatistics,
    world: World = SINGLE_PROCESS,
    *,
    tolerance: float = 1e-3,
    max_evaluations: int = 200,
) -> tuple[LinearHead, Solution]:
    """The balanced head of features (N, D), and how its solve ended."""
    classes = len(statistics.means)
    weights = balanced_weights(labels, classes)
    plain = LinearProblem(features, labels, weights, classes, ridge=0.0, world=world)
    problem = _WhitenedProblem(plain, statistics.power(-0.5), statistics.centre)
    start = np.zeros(classes * (features.shape[1] + 1))
    solution = minimise(problem, start, tolerance=tolerance, max_evaluations=max_evaluations)
    return problem.head(solution.x), solution


def spread(rows: LogitRows, frequency: Tensor, world: World = SINGLE_PROCESS, head: LinearHead | None = None) -> float:
    """Standard deviation over samples and classes of scores whose mean over classes is 0 for every sample.

    Args:
        rows: logits (N, K), or features (N, D) for a `head`.
        frequency: (N,) what each sample counts for.
        world: processes that share the rows.
        head: what turns features into scores.
    """
    totals = torch.zeros(3, dtype=torch.float64)  # weights, sums, sums of squares; one exchange between processes
    for where, chunk in rows.chunks(*world.share(rows.shape[0])):
        scores = chunk.double() if head is None else head.scores(chunk.double())
        scores = scores - scores.mean(1, keepdim=True)
        weights = frequency[where].unsqueeze(1)
        parts = (weights.sum() * scores.shape[1], (weights * scores).sum(), (weights * scores.square()).sum())
        totals += torch.stack(parts)
    count, total, squares = world.sum(totals).tolist()
    return float(np.sqrt(max(squares / count - (total / count) ** 2, 0.0)))
