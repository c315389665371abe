"""Unseen samples without sparing any: heads are fitted anew in folds, each scores the samples it was not fitted on.

This is right where the backbone was never trained on the samples (frozen features, a linear probe):
then a sample is unseen as soon as the heads have not seen it. The model's own head is fitted anew to
the training loss it has, so that it is as sure of its samples in the folds as it is in the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows
from longtail.posthoc.crt import LinearProblem, unpack
from longtail.posthoc.heads import LinearHead
from longtail.posthoc.inputs import FitData

FEWEST, MOST = 3, 5
RIDGE = 1e-8
MOST_STEPS = 500

# What is fitted on the other folds' samples, on the scale of their own head.
BuildHeads = Callable[[FitData, Array], dict[str, LinearHead]]


@dataclass(frozen=True)
class Fold:
    """Samples that were left out (indices), and the heads fitted on all others: the model's own, and the rest."""

    held: np.ndarray
    own: LinearHead
    heads: dict[str, LinearHead]

    def scores(self, features: Tensor) -> list[Tensor]:
        """Scores (B, K) of features (B, D) by every head, the own one first."""
        return [head.scores(features) for head in (self.own, *self.heads.values())]


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
        own = head_of_loss(part, own_labels, data.num_classes, loss, data.world)
        folds.append(Fold(held, own, build_heads(_part(data, part, own_labels, own), part)))
    return folds


def _stratified(labels: np.ndarray, number: int, seed: int) -> list[np.ndarray]:
    """Indices left out by each fold; a class with a single sample is never left out: nothing could be known of it."""
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


def head_of_loss(features: Array, labels: Tensor, classes: int, loss: float, world: World) -> LinearHead:
    """A linear head whose mean cross-entropy on features (N, D) is `loss`, on the way of L-BFGS from zero.

    A loss that cannot be reached gives the head that comes nearest.
    """
    weights = torch.full((len(labels),), 1 / len(labels), dtype=torch.float64)
    problem = LinearProblem(features, labels, weights, classes, RIDGE, world)
    start = np.zeros(classes * (features.shape[1] + 1))
    way = [(start, problem.value_and_gradient(start)[0])]

    def note(intermediate_result: object) -> None:
        x, value = intermediate_result.x, float(intermediate_result.fun)  # type: ignore[attr-defined]
        way.append((np.array(x), value))
        del way[:-2]
        if value <= loss:
            raise StopIteration

    if way[0][1] > loss:
        options = {"maxiter": MOST_STEPS, "ftol": 0.0, "gtol": 1e-9}
        minimize(problem.value_and_gradient, start, jac=True, method="L-BFGS-B", callback=note, options=options)
    (before, high), (after, low) = way[0], way[-1]
    # Between two steps the loss is nearly a line.
    share = 1.0 if high <= loss or low >= loss else (high - loss) / (high - low)
    weight, bias = unpack(torch.from_numpy(before + share * (after - before)), classes)
    return LinearHead(weight.numpy(), bias.numpy())
