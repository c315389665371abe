"""The plain classifier (a backbone and a linear head), and what a method minimises: the loss of a batch."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from longtail.backbones import num_features
from longtail.data.loading import Batch
from longtail.errors import UserError, number
from longtail.heads.kinds import CosineHead
from longtail.losses.base import LogitsLoss
from longtail.losses.class_balanced import ClassBalanced, effective_number_weights
from longtail.losses.focal import Focal
from longtail.losses.inputs import ClassCounts, as_class_counts
from longtail.losses.ldam import LDAM
from longtail.losses.weighted import DivideBy, WeightedCrossEntropy


class Classifier(nn.Module):
    """Images (N, C, H, W) to logits (N, K): `head(backbone(images))`.

    >>> import torch
    >>> from longtail.backbones import build_backbone
    >>> model = Classifier(build_backbone("digits", in_channels=1), num_classes=10)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self, backbone: nn.Module, num_classes: int, *, head: Callable[[int, int], nn.Module] = nn.Linear
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head(num_features(backbone), num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Features (N, D)."""
        return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def classifier_of_form(backbone: nn.Module, class_counts: Tensor, *, form: str = "softmax") -> nn.Module:
    """A backbone and a linear head whose bias is initialised for the form of the loss.

    In the sigmoid forms nearly all of the K binary targets are 0. With a bias of 0 every class would start at
    probability 1/2, and the first steps would only learn that; a bias of -log(K - 1) starts every class at 1/K.
    """
    model = Classifier(backbone, len(class_counts))
    if form != "softmax":
        nn.init.constant_(model.head.get_parameter("bias"), -math.log(len(class_counts) - 1))
    return model


def cosine_classifier(backbone: nn.Module, class_counts: Tensor, *, scale: float = 30.0) -> nn.Module:
    """A backbone and a normalised head."""
    return Classifier(backbone, len(class_counts), head=partial(CosineHead, scale=scale))


def parabolic(epoch: int, epochs: float) -> float:
    """1 - (epoch / epochs)²: falls from 1 towards 0; `epoch` counts from 0.

    >>> [parabolic(epoch, 4) for epoch in range(4)]
    [1.0, 0.9375, 0.75, 0.4375]
    """
    return 1 - (epoch / epochs) ** 2


@dataclass(frozen=True)
class Progress:
    """How far training is: `step` of `steps`, `epoch` (from 0) of `epochs`, and the learning rate of the step."""

    step: int
    steps: int
    epoch: int
    epochs: float
    lr: float = 0.0

    @property
    def fraction(self) -> float:
        """Share of the steps that are done, from 0 towards 1."""
        return self.step / self.steps


class Objective(nn.Module, ABC):
    """The loss of a method, and how its training differs from plain training.

    Class attribute `stages`: number of training stages; the learning rate schedule restarts in each.
    """

    stages: ClassVar[int] = 1

    @property
    def one_class(self) -> str:
        """The reason why every image must have one true class; empty if its loss takes soft targets."""
        return "its loss is defined for images of one class each"

    @abstractmethod
    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        """The loss of one batch per stream of images."""

    def rate(self, part: str, progress: Progress) -> float:
        """Factor of the learning rate for one part of the network (an attribute name, such as "backbone")."""
        return 1.0


class LossObjective(Objective):
    """`loss(logits, target)` on one stream of images; other methods define an objective."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    @property
    def one_class(self) -> str:
        return getattr(self.loss, "one_class", "")

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        (batch,) = batches
        return self.loss(model(batch.images), batch.labels)


class Deferred(Objective):
    """One loss in the first stage of training, another in the rest.

    Args:
        first: `loss(logits, target)` of the first stage.
        then: `loss(logits, target)` of the rest.
        start: share of the training after which `then` is used, 0 to 1.
    """

    def __init__(self, first: nn.Module, then: nn.Module, *, start: float = 0.8) -> None:
        super().__init__()
        self.first = LossObjective(first)
        self.then = LossObjective(then)
        self.start = number("start", start, at_least=0, at_most=1)

    @property
    def one_class(self) -> str:
        return self.first.one_class or self.then.one_class

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        objective = self.first if progress.fraction < self.start else self.then
        return objective(model, batches, progress)


class Reweighted(nn.Module):
    """A loss with class weights, which multiply their parts of the target; divided by the sum of the samples' weights.

    Losses that take soft targets are linear in them, so that weights w and a target t give sum(w t) times the loss of
    the target w t / sum(w t). In the others the weight of the one true class multiplies the loss of the sample.
    """

    class_weights: Tensor

    def __init__(self, loss: LogitsLoss, class_weights: Tensor) -> None:
        super().__init__()
        self.one_class = loss.one_class
        self.loss = copy.copy(loss)  # with the same buffers: what Seesaw has counted is the same before and after
        self.loss.reduction, self.loss.label_smoothing = "none", 0.0
        self.label_smoothing = loss.label_smoothing
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.one_class:
            weights = self.class_weights[target]
            return (weights * self.loss(logits, target)).sum() / weights.sum()
        classes = len(self.class_weights)
        soft = F.one_hot(target, classes).to(self.class_weights) if target.ndim == 1 else target
        smooth = (1 - self.label_smoothing) * soft + self.label_smoothing / classes
        weighted = smooth * self.class_weights
        size = weighted.sum(1)
        losses = size * self.loss(logits, weighted / size.unsqueeze(1))
        return losses.sum() / (soft @ self.class_weights).sum()


def no_deferral(objective: Objective) -> str:
    """The reason why an objective takes no deferred class weights; empty if it does."""
    if isinstance(objective, Deferred):
        return "it defers its class weights already (--options start FRACTION)"
    # Objectives derived from `LossObjective` do more than call the loss, which `Deferred` would leave out.
    loss = objective.loss if type(objective) is LossObjective else None
    if not isinstance(loss, nn.CrossEntropyLoss | LogitsLoss):
        return "it minimises more than one loss per image"
    return "it weighs the classes from the beginning" if isinstance(loss, ClassBalanced | WeightedCrossEntropy) else ""


def defer(objective: Objective, class_counts: ClassCounts, *, start: float, beta: float = 0.9999) -> Deferred:
    """Deferred re-weighting (DRW): the loss of an objective as it is, then with class-balanced weights.

    As in the released code of LDAM-DRW, the weighted loss is divided by the sum of the samples' weights. Only for
    objectives without a reason of `no_deferral`.

    Paper: Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019.
    """
    if obstacle := no_deferral(objective):
        raise UserError(f"{type(objective).__name__} takes no deferred class weights, because {obstacle}")
    loss = cast(LossObjective, objective).loss
    weights = effective_number_weights(as_class_counts(class_counts, "--defer").float(), beta)
    if isinstance(loss, nn.CrossEntropyLoss):
        smoothing = loss.label_smoothing
        then: nn.Module = ClassBalanced(class_counts, beta=beta, divide_by="weights", label_smoothing=smoothing)
    elif isinstance(loss, Focal):  # its authors divide by the number of samples
        then = copy.deepcopy(loss)
        then.class_weights = weights
    else:
        then = Reweighted(cast(LogitsLoss, loss), weights)
    return Deferred(cast(nn.Module, loss), then, start=start)


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

    The class weights of the last stage are those of the Class-Balanced loss with `beta`. On CIFAR the authors train
    for 200 epochs, re-weight from epoch 160 on (`start`), and lower a learning rate of 0.1 at epochs 160 and 180.
    Here length and learning rate are those of the recipe, so that all methods have the same budget.
    """
    settings: dict[str, Any] = {"max_margin": max_margin, "scale": scale, "divide_by": divide_by, "scaled": True}
    counts = as_class_counts(class_counts, "LDAM").float()
    weights = effective_number_weights(counts, number("beta", beta, at_least=0, below=1))
    first, then = LDAM(class_counts, **settings), LDAM(class_counts, class_weights=weights, **settings)
    return Deferred(first, then, start=start)
