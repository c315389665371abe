"""Scores of samples that no head was fitted on: held-out ones, or those that each fold of a cross-fit leaves out.

Cross-fitting is right where the backbone was never trained on the samples (frozen features, a linear probe):
then a sample is unseen as soon as the heads have not seen it. The model's head is fitted again in every fold, to
the training loss of the model, so that it is as confident on its samples in the folds as in the model. The head that is
deployed is fitted again in the same way on all samples: the coefficients fit it, not a head with larger weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import brentq, minimize, minimize_scalar
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.held_out import number_of_folds, stratified_folds
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver.linear import ClassStatistics, LinearHead, LinearProblem, StackedHeads, class_statistics

BLOCK = 1 << 17  # scores of one head in a block: they stay in the processor's cache
FIRST_RIDGE, RIDGE_STEP, LAST_RIDGE = 0.4, 4.0, 1e-6
STAGE_STEPS = 8  # of L-BFGS for each ridge
NEARLY_ZERO_LOSS = 0.01  # below this loss only the scale of a head grows
LARGEST_SCALE = 50.0
LOSS_SCORES = 1 << 24  # scores that the loss of a head is computed from
SMALLEST_CURVATURE = 1e-9

# Heads fitted on the samples of the other folds, on the scale of the model's head there.
BuildHeads = Callable[[FitData, Array, ClassStatistics], dict[str, LinearHead]]
# Scores (S, K, B) of some samples in a floating type, those of the model first.
ReadScores = Callable[[torch.dtype], Tensor]
# One pass over this process's share of the unseen samples: their positions, and a function that gives their scores.
Scores = Callable[[], Iterator[tuple[slice, ReadScores]]]


@dataclass(frozen=True)
class ScoredSamples:
    """Unseen samples as the mixture sees them.

    Args:
        labels: (B,) among the classes that are present.
        weights: (B,) float64.
        scores: (S, K, B) of the model, then of each head minus the model; relative to the score of the true class.
    """

    labels: Tensor
    weights: Tensor
    scores: Tensor

    @classmethod
    def from_scores(cls, labels: Tensor, weights: Tensor, scores: Tensor) -> Self:
        """From scores (S, K, B) of the model and of the heads."""
        scores = scores - scores.gather(1, labels.expand(len(scores), 1, -1))
        scores[1:] -= scores[0].clone()
        return cls(labels, weights, scores.contiguous())

    def blocks(self) -> Iterable[ScoredSamples]:
        """The samples in blocks that fit in the cache."""
        size = max(BLOCK // self.scores.shape[1], 1)
        if len(self.labels) <= size:
            return [self]
        return [self.subset(slice(start, start + size)) for start in range(0, len(self.labels), size)]

    def subset(self, samples: slice | Tensor) -> ScoredSamples:
        return ScoredSamples(self.labels[samples], self.weights[samples], self.scores[:, :, samples].contiguous())


def model_scores(held_out: FitData, heads: dict[str, LinearHead]) -> Iterator[tuple[slice, ReadScores]]:
    """Scores of held-out samples by the model and by the heads."""
    stacked = StackedHeads(list(heads.values())) if heads else None
    features = held_out.rows if held_out.features is None else LogitRows(held_out.features)

    def scores(rows: slice, dtype: torch.dtype) -> Tensor:
        logits = held_out.rows.read(rows).to(dtype).T.unsqueeze(0)
        return logits if stacked is None else torch.cat([logits, stacked.scores(features.read(rows), dtype)])

    for rows in _batches(*held_out.world.share(len(held_out.labels)), held_out.num_classes):
        yield rows, partial(scores, rows)


def fold_scores(folds: list[Fold], features: LogitRows, world: World) -> Iterator[tuple[slice, ReadScores]]:
    """Scores of samples by the heads of the fold that left them out, fold by fold."""
    first = 0
    for fold in folds:
        heads = StackedHeads([fold.model_head, *fold.heads.values()])
        for rows in _batches(*world.share(len(fold.left_out)), len(fold.model_head.bias)):
            inputs = features.read(fold.left_out[rows])
            yield slice(first + rows.start, first + rows.stop), partial(heads.scores, inputs)
        first += len(fold.left_out)


def _batches(first: int, last: int, classes: int) -> Iterator[slice]:
    """Samples scored at a time: enough for an efficient matrix product."""
    size = int(np.clip(BLOCK // classes, 256, 2048))
    for start in range(first, last, size):
        yield slice(start, min(start + size, last))


@dataclass(frozen=True)
class Fold:
    """Samples that were left out (indices), and the heads fitted on all others: the model's head, and the stack."""

    left_out: np.ndarray
    model_head: LinearHead
    heads: dict[str, LinearHead]


def cross_fit(data: FitData, features: Array, build_heads: BuildHeads, *, seed: int = 0) -> list[Fold]:
    """Heads of each fold; as many folds as the smallest class allows, 3 to 5."""
    labels, counts = data.labels.numpy(), data.seen_counts
    if (counts > 1).sum() < 2:
        raise UserError("cross-fitting needs two classes with at least two samples each")
    loss = mean_loss(data)
    folds = []
    for left_out in stratified_folds(labels, number_of_folds(counts), seed, keep_single=True):
        kept = np.setdiff1d(np.arange(len(labels)), left_out)
        inputs, kept_labels = np.asarray(features)[kept], data.labels[torch.from_numpy(kept)]
        folds.append(Fold(left_out, *refit_heads(data, inputs, kept_labels, loss, build_heads)))
    return folds


def refit_heads(
    data: FitData, features: Array, labels: Tensor, loss: float, build_heads: BuildHeads
) -> tuple[LinearHead, dict[str, LinearHead]]:
    """The model's head fitted again to a mean cross-entropy of `loss` on samples of `data`, and the stack beside it."""
    statistics = class_statistics(features, labels, data.num_classes, data.world)
    head = head_of_loss(features, labels, statistics, loss, data.world)
    # The samples as if they were the training set of a model with this head.
    weight, bias = (torch.from_numpy(values).float() for values in (head.weight, head.bias))
    rows = LogitRows(features, weight, bias)
    counts, norms = np.bincount(labels.numpy(), minlength=data.num_classes), np.ones(data.num_classes)
    train = FitData(rows, labels, counts, norms, data.classes, features=features, world=data.world)
    return head, build_heads(train, features, statistics)


def mean_loss(data: FitData) -> float:
    """Mean cross-entropy of the model's logits."""
    total = torch.zeros(1, dtype=torch.float64)
    for where, chunk in data.rows.chunks(*data.world.share(len(data.labels))):
        total += F.cross_entropy(chunk.double(), data.labels[where], reduction="sum")
    return float(data.world.sum(total)) / len(data.labels)


def head_of_loss(
    features: Array, labels: Tensor, statistics: ClassStatistics, loss: float, world: World = SINGLE_PROCESS
) -> LinearHead:
    """A linear head whose mean cross-entropy on features (N, D) is `loss`: the simplest one, of the smallest weights.

    The ridge falls in stages, each starting from the head of the last one, until the loss is reached or is nearly 0;
    the scale of the head is adjusted for the rest. The first stage starts at zero, so that samples left out have no
    influence. A loss that cannot be reached gives the head that comes nearest.
    """
    weights = torch.full((len(labels),), 1 / len(labels), dtype=torch.float64)
    variance = float(np.trace(statistics.covariance)) / len(statistics.covariance)
    penalty = np.diag(np.append(np.full(len(statistics.covariance), variance), 1.0))
    problem = LinearProblem(features, labels, weights, statistics, FIRST_RIDGE * penalty, world=world)
    matrix = np.zeros((problem.classes, problem.width + 1))
    reached, ridge, curvature = math.log(problem.classes), FIRST_RIDGE, 1 / problem.classes
    rows = torch.arange(0, len(labels), max(1, len(labels) * problem.classes // LOSS_SCORES))
    head = problem.head(problem.start)
    while reached > max(loss, NEARLY_ZERO_LOSS) and ridge > LAST_RIDGE:
        problem.penalty = ridge * penalty
        problem.precondition(curvature)
        options = {"maxiter": STAGE_STEPS, "ftol": 0.0, "gtol": 0.0}
        start = problem.variables(matrix)
        stage = minimize(problem.value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
        matrix, head = problem.matrix(stage.x), problem.head(stage.x)
        scores = _scores(head, features, rows)
        reached = float(F.cross_entropy(scores, labels[rows]))
        shares = scores.softmax(1)
        curvature = max(float((shares * (1 - shares)).mean()), SMALLEST_CURVATURE)
        ridge /= RIDGE_STEP
    return head.times(_scale_of(_scores(head, features, rows), labels[rows], loss))


def _scores(head: LinearHead, features: Array, rows: Tensor) -> Tensor:
    return head.scores(LogitRows(features).read(rows.numpy())).double()


def _scale_of(scores: Tensor, labels: Tensor, loss: float) -> float:
    """The factor of the scores that gives a mean cross-entropy of `loss`, or the nearest one possible."""

    def reached(scale: float) -> float:
        return float(F.cross_entropy(scale * scores, labels))

    if reached(0.0) <= loss:
        return 0.0
    lowest = float(minimize_scalar(reached, bounds=(0.0, LARGEST_SCALE), method="bounded").x)
    return lowest if reached(lowest) >= loss else float(brentq(lambda scale: reached(scale) - loss, 0.0, lowest))
