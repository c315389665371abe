"""DisAlign's head: a linear layer whose logits are mixed with rescaled and shifted ones.

It is in a file of its own so that a saved model opens without importing scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longtail.networks.head import new_linear


def align(logits: Tensor, confidence: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`s (a z + b) + (1 - s) z` of logits z (N, K), confidence s (N, 1), scale a (K,) and shift b (K,)."""
    return logits + confidence * ((scale - 1) * logits + shift)


class DisAlignHead(nn.Module):
    """A linear layer followed by the mixture: features (N, D) to logits (N, K)."""

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = True) -> None:
        super().__init__()
        self.classifier = new_linear(in_features, num_classes, bias=bias)
        self.scale = nn.Parameter(torch.ones(num_classes))
        self.shift = nn.Parameter(torch.zeros(num_classes))
        self.confidence_weight = nn.Parameter(torch.zeros(in_features))
        self.confidence_bias = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        confidence = (features @ self.confidence_weight + self.confidence_bias).sigmoid().unsqueeze(1)
        return align(self.classifier(features), confidence, self.scale, self.shift)
