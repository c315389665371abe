"""Linear heads fitted on stored features: linear discriminant analysis, and a balanced one in its metric.

With class means m_k, their mean g and the covariance S within classes (see `solver.linear`):

    LDA:       score_k = (m_k - g)' S^-1 x - (m_k - g)' S^-1 (m_k + g) / 2
    balanced:  minimise sum_i w_i CE_i + 0.005 |W|^2 + 0.00005 |b|^2 over W, b on (x - g) S^(-1/2),
               w_i proportional to 1 / n_{y_i} and summing to 1

Papers: Fisher, The use of multiple measurements in taxonomic problems, 1936 (LDA).
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import Solution, minimise
from longtail.posthoc.solver.linear import (
    SINGLE_PRECISION,
    ClassStatistics,
    LinearHead,
    LinearProblem,
    balanced_weights,
)

WEIGHT_RIDGE, BIAS_RIDGE = 0.01, 1e-4
SMALLEST_SPREAD = 1e-6  # below it the scores of a head are rounding errors


def lda_head(statistics: ClassStatistics) -> LinearHead:
    """Linear discriminant analysis with equal priors."""
    means, centre = statistics.means, statistics.centre
    weight = cho_solve(cho_factor(statistics.covariance), (means - centre).T).T
    return LinearHead(weight, -0.5 * (weight * (means + centre)).sum(1))


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
    # |W|^2 on whitened features is tr(V S V') of the head V on features as they are.
    penalty = np.zeros((len(statistics.centre) + 1,) * 2)
    penalty[:-1, :-1] = WEIGHT_RIDGE * statistics.covariance
    penalty[-1, -1] = BIAS_RIDGE
    weights = balanced_weights(labels, len(statistics.means))
    exact = tolerance < SINGLE_PRECISION
    problem = LinearProblem(features, labels, weights, statistics, penalty, exact=exact, world=world)
    solution = minimise(problem, problem.start, tolerance=tolerance, max_evaluations=max_evaluations)
    return problem.head(solution.x), solution


def spread(rows: LogitRows, frequency: Tensor, world: World = SINGLE_PROCESS, head: LinearHead | None = None) -> float:
    """Standard deviation over samples and classes of scores whose mean over classes is 0 for every sample.

    Args:
        rows: logits (N, K), or features (N, D) for a `head`.
        frequency: (N,) weight of each sample.
        world: processes that share the rows.
        head: gives the scores of features.
    """
    totals = torch.zeros(2, dtype=torch.float64)  # weights, sums of squares; one exchange between processes
    for where, chunk in rows.chunks(*world.share(rows.shape[0])):
        scores = chunk.double() if head is None else head.scores(chunk.double())
        scores = scores - scores.mean(1, keepdim=True)
        weights = frequency[where].unsqueeze(1)
        totals += torch.stack((weights.sum() * scores.shape[1], (weights * scores.square()).sum()))
    count, squares = world.sum(totals).tolist()
    return float(np.sqrt(squares / count))


def stack_heads(data: FitData, features: Array, statistics: ClassStatistics, tolerance: float) -> dict[str, LinearHead]:
    """LDA and the balanced head, centred over classes, on the scale of the model's logits."""
    world = data.world
    balanced, _ = balanced_head(features, data.labels, statistics, world, tolerance=tolerance)
    frequency = torch.from_numpy(data.frequency)[data.labels]
    model_spread = spread(data.rows, frequency, world) or 1.0
    heads = {}
    for name, head in (("lda", lda_head(statistics)), ("balanced", balanced)):
        centred = head.centred()
        head_spread = spread(LogitRows(features), frequency, world, centred)
        heads[name] = centred.times(model_spread / head_spread if head_spread > SMALLEST_SPREAD else 0.0)
    return heads
