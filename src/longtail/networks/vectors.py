"""Unit vectors, and linear heads whose class vectors are unit vectors.

A head made here is an `nn.Linear` whose `weight` is the normalised weight. The logits are linear in the input of
the head, so margins, extraction and calibration treat it like any other linear head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

SHORTEST = 1e-6  # shorter vectors are not stretched to length 1: no division by zero, no exploding gradient


def lengths(x: Tensor) -> Tensor:
    """Euclidean lengths over the last dimension, (…, 1), computed without overflow."""
    scaled, scale = _scaled(x)
    return scale * torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension; a zero vector stays zero.

    >>> unit(torch.tensor([[3.0, 4.0], [3e30, 4e30], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    scaled, _ = _scaled(x)
    return scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp(min=SHORTEST)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x divided by a scale so that no entry exceeds 1, and the scale.

    No gradient flows through the scale: neither length nor direction depends on it.
    """
    scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1)
    return x / scale, scale


class UnitRows(nn.Module):
    """Splits each row of a weight (K, D) into `blocks` parts w and normalises each: `scale * w / (|w| + gamma)`."""

    def __init__(self, scale: float, blocks: int = 1, gamma: float = 0.0) -> None:
        super().__init__()
        self.scale = scale
        self.blocks = blocks
        self.gamma = gamma

    def forward(self, weight: Tensor) -> Tensor:
        pieces = weight.unflatten(1, (self.blocks, -1))
        normalised = pieces / (lengths(pieces) + self.gamma).clamp(min=SHORTEST)
        return self.scale * normalised.flatten(1)


def unit_head(num_features: int, num_classes: int, *, scale: float, blocks: int = 1, gamma: float = 0.0) -> nn.Linear:
    """A linear head without bias; its `weight` (K, D) comes out of `UnitRows`."""
    head = nn.Linear(num_features, num_classes, bias=False)
    register_parametrization(head, "weight", UnitRows(scale, blocks, gamma))
    return head
