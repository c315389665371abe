"""The plain classifier every decision-boundary method starts from: a backbone and a linear head."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from longtail.backbones import num_features


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
    """A backbone and a linear head that starts as the form of its loss asks for.

    With K yes-or-no questions nearly all answers are no. From the probability 1/2 of a zero bias those
    would be all that the first steps learn; a bias of -log(K - 1) starts every class at 1/K.
    """
    model = Classifier(backbone, len(class_counts))
    if form != "softmax":
        nn.init.constant_(model.head.get_parameter("bias"), -math.log(len(class_counts) - 1))
    return model
