"""The layers that a run folder can store as a head, by class name.

A calibrated model is opened by this name. A method that folds needs no entry: its head is linear.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from longtail.networks.disalign_head import DisAlignHead
from longtail.networks.head import guess_head
from longtail.networks.sigmoid_head import SigmoidHead

SAVED_HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "Linear": nn.Linear,
    "DisAlignHead": DisAlignHead,
    "SigmoidHead": SigmoidHead,
}


def saved_head(model: nn.Module) -> nn.Module:
    """The head of a model, features (N, D) to logits (N, K): a linear layer, or a `SAVED_HEADS` module around it."""
    path = guess_head(model)
    around = model.get_submodule(path.rpartition(".")[0])
    return around if type(around).__name__ in SAVED_HEADS else model.get_submodule(path)
