"""The objective of a stage-one method: one number from a network, its batches and the progress of training.

A method that needs several streams of images (BBN, Hybrid-SC) gets one batch of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from longtail.data.loading import Batch


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

    @abstractmethod
    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        """The loss of one batch per stream of images."""

    def rate(self, part: str, progress: Progress) -> float:
        """Factor of the learning rate for one part of the network (an attribute name, such as "backbone")."""
        return 1.0


class LossObjective(Objective):
    """`loss(logits, target)` on one stream of images; methods that need more have their own objective."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        (batch,) = batches
        return self.loss(model(batch.images), batch.labels)
