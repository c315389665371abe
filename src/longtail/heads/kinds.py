"""Unit vectors, and linear heads whose class vectors are unit vectors.

A head made here is an `nn.Linear` whose `weight` is the normalised weight. The logits are linear in the input of
the head, so margins, extraction and calibration treat it like any other linear head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from longtail.errors import number
from longtail.files.tensors import without_autocast
from longtail.heads.fold import head_of, linear_layer

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


def align(logits: Tensor, confidence: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`s (a z + b) + (1 - s) z` of logits z (N, K), confidence s (N, 1), scale a (K,) and shift b (K,)."""
    return logits + confidence * ((scale - 1) * logits + shift)


class DisAlignHead(nn.Module):
    """A linear layer followed by the mixture: features (N, D) to logits (N, K)."""

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = True) -> None:
        super().__init__()
        zeros = torch.zeros(num_classes)
        self.classifier = linear_layer(torch.zeros(num_classes, in_features), zeros if bias else None)
        self.scale = nn.Parameter(torch.ones(num_classes))
        self.shift = nn.Parameter(torch.zeros(num_classes))
        self.confidence_weight = nn.Parameter(torch.zeros(in_features))
        self.confidence_bias = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        confidence = (features @ self.confidence_weight + self.confidence_bias).sigmoid().unsqueeze(1)
        return align(self.classifier(features), confidence, self.scale, self.shift)


class SigmoidHead(nn.Module):
    """Features (N, D) to `log sigmoid(W f + b)` (N, K); the softmax of these is the sigmoids divided by their sum."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.classifier = linear_layer(torch.zeros(num_classes, in_features), torch.zeros(num_classes))

    def forward(self, features: Tensor) -> Tensor:
        return F.logsigmoid(self.classifier(features))


SAVED_HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    kind.__name__: kind for kind in (nn.Linear, DisAlignHead, SigmoidHead)
}


def saved_head(network: nn.Module) -> nn.Module:
    """The head of a network of this library: a `SAVED_HEADS` module, features (N, D) to logits (N, K)."""
    head = network.get_submodule("head")
    return head if type(head).__name__ in SAVED_HEADS else head_of(network)
