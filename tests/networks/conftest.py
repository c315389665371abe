"""What tests of networks share: a backbone that gives back its input, so that a case's features are the images."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Vectors(nn.Module):
    """Images (N, D) are their own features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width
        self.last_block = nn.Identity()

    def early_map(self, x):
        return x[:, :, None, None]

    feature_map = early_map

    def forward(self, x):
        return x


@pytest.fixture
def on_features():
    """`on_features(Network, case, …)`: a float64 network without a backbone for a golden case."""

    def build(network, case, **options):
        return network(Vectors(case["features"].shape[1]), torch.as_tensor(case["class_counts"]), **options).double()

    return build
