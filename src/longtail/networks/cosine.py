"""A normalised head: logits are cosines between features and class vectors, times a scale.

    z = s * f.W_j / (|f| |W_j|)

The scale is part of the head, so its outputs are logits wherever logits are expected: softmax, calibration
error, saved outputs. A loss that subtracts margins from cosines must know this (`LDAM(…, scaled=True)`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from longtail.core.arrays import without_autocast
from longtail.errors import number
from longtail.networks.classifier import Classifier
from longtail.networks.vectors import unit, unit_head


class CosineHead(nn.Module):
    """Features (N, D) to logits (N, K) in [-scale, scale]; no bias.

    `head_of` finds the attribute `linear`. Its inputs are features of unit length; its weight (K, D) holds
    the class vectors, rescaled to length `scale`. It can be replaced by a plain `nn.Linear`.

    >>> head = CosineHead(3, 2, scale=10.0)
    >>> head.linear.weight.norm(dim=1).round().tolist()
    [10.0, 10.0]
    """

    def __init__(self, in_features: int, num_classes: int, *, scale: float = 30.0) -> None:
        super().__init__()
        self.linear = unit_head(in_features, num_classes, scale=number("scale", scale, above=0))

    def forward(self, features: Tensor) -> Tensor:
        precision = next(self.linear.parameters()).dtype
        # In half precision a cosine has an error of 0.004, and the scale multiplies it.
        with without_autocast(features):
            return self.linear(unit(features.to(precision)))


def cosine_classifier(backbone: nn.Module, class_counts: Tensor, *, scale: float = 30.0) -> nn.Module:
    """A backbone and a normalised head."""
    return Classifier(backbone, len(class_counts), head=partial(CosineHead, scale=scale))
