"""One batch through a network of this library: its head is one linear layer with one input vector per sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from longtail.networks.head_layers import Seen, watching


@dataclass(frozen=True)
class Piece:
    """Outputs of one batch."""

    features: Tensor
    logits: Tensor
    labels: Tensor


def head_arrays(linear: nn.Linear) -> dict[str, Any]:
    """Weight and bias of a head as arrays."""
    arrays = {"head_weight": linear.weight.detach().float().cpu().numpy().copy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().cpu().numpy().copy()
    return arrays


@contextmanager
def watching_head(linear: nn.Linear) -> Iterator[list[Seen]]:
    """Collect (input, output) of the head each time it runs."""
    with watching({"head": linear}) as seen:
        yield seen["head"]


def run_batch(model: nn.Module, images: Tensor, labels: Tensor, seen: list[Seen]) -> Piece:
    """Runs images (N, C, H, W) through the network and records its head."""
    seen.clear()
    model(images)
    ((features, logits),) = seen
    return Piece(features, logits, labels)
