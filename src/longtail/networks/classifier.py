"""The plain classifier that every decision-boundary method starts from: a backbone and a linear head."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from longtail.backbones import num_features
from longtail.heads.kinds import CosineHead


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
