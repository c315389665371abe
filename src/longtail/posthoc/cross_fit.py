"""Unseen samples without a validation split: heads are fitted in folds, and each scores the samples of its own fold.

This is right where the backbone was never trained on the samples (frozen features, a linear probe):
then a sample is unseen as soon as the heads have not seen it. The model's own head is fitted anew to
the training loss it has, so that it is as sure of its samples in the folds as it is in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq, minimize, minimize_scalar
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.class_statistics import ClassStatistics, class_statistics
from longtail.posthoc.inputs import FitData
from longtail.posthoc.linear import LinearHead, LinearProblem

FEWEST, MOST = 3, 5
FIRST_RIDGE, RIDGE_STEP, LAST_RIDGE = 0.4, 4.0, 1e-6
STAGE_STEPS = 8  # of L-BFGS for each ridge
WELL_KNOWN = 0.01  # a loss from which on only the scale of a head grows
LARGEST_SCALE = 50.0
LOOKED_AT = 1 << 24  # scores from which the loss of a head is taken
SMALLEST_CURVATURE = 1e-9

# What is fitted on the other folds' samples, on the scale of their own head.
BuildHeads = Callable[[FitData, Array, ClassStatistics], dict[str, LinearHead]]


@dataclass(frozen=True)
class Fold:
    """Samples that were left out (indices), and the heads fitted on all others: the model's own, and the rest."""

    held: np.ndarray
    own: LinearHead
    heads: dict[str, LinearHead]


def cross_fit(data: FitData, features: Array, build_heads: BuildHeads, *, seed: int = 0) -> list[Fold]:
    """Heads of each fold; as many folds as the smallest class allows, 3 to 5."""
    labels, counts = data.labels.numpy(), data.seen_counts
    if (counts > 1).sum() < 2:
        raise UserError("cross-fitting needs two classes with at least two samples each")
    number = int(np.clip(counts[counts > 1].min(), FEWEST, MOST))
    loss = mean_loss(data)
    folds = []
    for held in _stratified(labels, number, seed):
        kept = np.setdiff1d(np.arange(len(labels)), held)
        part, own_labels = np.asarray(features)[kept], data.labels[torch.from_numpy(kept)]
        statistics = class_statistics(part, own_labels, data.num_classes, data.world)
        own = head_of_loss(part, own_labels, statistics, loss, data.world)
        folds.append(Fold(held, own, build_heads(_part(data, part, own_labels, own), part, statistics)))
    return folds


def _stratified(labels: np.ndarray, number: int, seed: int) -> list[np.ndarray]:
    """Indices left out by each fold; the only sample of a class is never left out, so that every head knows it."""
    rng = np.random.default_rng(seed)
    fold = np.full(len(labels), -1)
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        if len(own) > 1:
            fold[own] = (np.arange(len(own)) + rng.integers(number)) % number
    return [np.flatnonzero(fold == which) for which in range(number)]


def _part(data: FitData, features: np.ndarray, labels: Tensor, own: LinearHead) -> FitData:
    """A part of the samples as if it were the training set, with the head fitted on it."""
    weight, bias = (torch.from_numpy(values).float() for values in (own.weight, own.bias))
    rows = LogitRows(features=features, weight=weight, bias=bias)
    counts = np.bincount(labels.numpy(), minlength=data.num_classes)
    return FitData(rows, labels, counts, np.ones(data.num_classes), data.classes, features=features, world=data.world)


def mean_loss(data: FitData) -> float:
    """Mean cross-entropy of the model's own logits."""
    total = torch.zeros(1, dtype=torch.float64)
    for where, chunk in data.rows.chunks(*data.world.share(len(data.labels))):
        total += torch.nn.functional.cross_entropy(chunk.double(), data.labels[where], reduction="sum")
    return float(data.world.sum(total)) / len(data.labels)


def head_of_loss(
    features: Array, labels: Tensor, statistics: ClassStatistics, loss: float, world: World = SINGLE_PROCESS
) -> LinearHead:
    """A linear head whose mean cross-entropy on features (N, D) is `loss`: the simplest one, of the smallest weights.

    The ridge falls in stages, each solved from the last one's head, until the loss is reached or every sample is
    known well; the scale of the head makes up the rest. It begins at zero: nothing of samples left out is in it.
    A loss that cannot be reached gives the head that comes nearest.
    """
    weights = torch.full((len(labels),), 1 / len(labels), dtype=torch.float64)
    variance = float(np.trace(statistics.covariance)) / len(statistics.covariance)
    simple = np.diag(np.append(np.full(len(statistics.covariance), variance), 1.0))
    problem = LinearProblem(features, labels, weights, statistics, FIRST_RIDGE * simple, world=world)
    matrix = np.zeros((problem.classes, problem.width + 1))
    reached, ridge, curvature = math.log(problem.classes), FIRST_RIDGE, 1 / problem.classes
    rows = torch.arange(0, len(labels), max(1, len(labels) * problem.classes // LOOKED_AT))
    head = problem.head(problem.start)
    while reached > max(loss, WELL_KNOWN) and ridge > LAST_RIDGE:
        problem.penalty = ridge * simple
        problem.precondition(curvature)
        options = {"maxiter": STAGE_STEPS, "ftol": 0.0, "gtol": 0.0}
        start = problem.variables(matrix)
        found = minimize(problem.value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
        matrix, head = problem.matrix(found.x), problem.head(found.x)
        scores = _scores(head, features, rows)
        reached = float(torch.nn.functional.cross_entropy(scores, labels[rows]))
        shares = scores.softmax(1)
        curvature = max(float((shares * (1 - shares)).mean()), SMALLEST_CURVATURE)
        ridge /= RIDGE_STEP
    return head.times(_scale_of(_scores(head, features, rows), labels[rows], loss))


def _scores(head: LinearHead, features: Array, rows: Tensor) -> Tensor:
    return head.scores(LogitRows(features).read(rows.numpy())).double()


def _scale_of(scores: Tensor, labels: Tensor, loss: float) -> float:
    """The factor of the scores that gives a mean cross-entropy of `loss`, or the nearest one possible."""

    def reached(scale: float) -> float:
        return float(torch.nn.functional.cross_entropy(scale * scores, labels))

    if reached(0.0) <= loss:
        return 0.0
    lowest = float(minimize_scalar(reached, bounds=(0.0, LARGEST_SCALE), method="bounded").x)
    return lowest if reached(lowest) >= loss else float(brentq(lambda scale: reached(scale) - loss, 0.0, lowest))
