"""A linear layer followed by a log-sigmoid: the head that Platt scaling produces."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from longtail.networks.head import new_linear


class SigmoidHead(nn.Module):
    """Features (N, D) to `log sigmoid(W f + b)` (N, K); the softmax of these is the sigmoids divided by their sum."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.classifier = new_linear(in_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        return F.logsigmoid(self.classifier(features))
