"""Objectives that change during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from longtail.data.loading import Batch
from longtail.errors import number
from longtail.losses.class_balanced import effective_number_weights
from longtail.losses.inputs import ClassCounts, as_class_counts
from longtail.losses.ldam import LDAM
from longtail.losses.weighted import DivideBy
from longtail.networks.objective import LossObjective, Objective, Progress


class Deferred(Objective):
    """One loss in the first part of training, another in the rest.

    Args:
        first: `loss(logits, target)` of the first part.
        then: `loss(logits, target)` of the rest.
        start: share of the training after which `then` is used, 0 to 1.
    """

    def __init__(self, first: nn.Module, then: nn.Module, *, start: float = 0.8) -> None:
        super().__init__()
        self.first = LossObjective(first)
        self.then = LossObjective(then)
        self.start = number("start", start, at_least=0, at_most=1)

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        objective = self.first if progress.fraction < self.start else self.then
        return objective(model, batches, progress)


def deferred_ldam(
    class_counts: ClassCounts,
    *,
    max_margin: float = 0.5,
    scale: float = 30.0,
    beta: float = 0.9999,
    start: float = 0.8,
    divide_by: DivideBy = "weights",
) -> Deferred:
    """LDAM with deferred re-weighting (DRW), on the logits of a `CosineHead` of the same scale.

    The class weights of the last part are those of the Class-Balanced loss with `beta`. On CIFAR the authors train
    for 200 epochs, re-weight from epoch 160 on (`start`), and lower a learning rate of 0.1 at epochs 160 and 180.
    Here length and learning rate are those of the recipe, so that all methods have the same budget.
    """
    settings: dict[str, Any] = {"max_margin": max_margin, "scale": scale, "divide_by": divide_by, "scaled": True}
    counts = as_class_counts(class_counts, "LDAM").float()
    weights = effective_number_weights(counts, number("beta", beta, at_least=0, below=1))
    first, then = LDAM(class_counts, **settings), LDAM(class_counts, class_weights=weights, **settings)
    return Deferred(first, then, start=start)
