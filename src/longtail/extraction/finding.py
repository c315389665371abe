"""Which layer of anybody's model is its classifier: shown by a batch, or guessed by names."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtail.errors import UserError
from longtail.extraction.batches import split_batch
from longtail.extraction.reader import find
from longtail.extraction.running import running
from longtail.networks.head import HeadName, guess_head


def find_head(model: nn.Module, name: str | None = None, *, batch: Any = None, device: str = "auto") -> HeadName:
    """The name of the layer that makes the answer of a model, as `model.get_submodule` takes it.

    With a batch the model is run, and its answer shows the layer. Without, names and places are looked at: what
    comes back then may be wrong, and its attribute `sure` says so.

    Args:
        model: any model.
        name: the layer, or a part of the model it is in, if you know.
        batch: what a loader gives, (inputs, labels) or a dictionary with labels.
        device: where to run the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> found = find_head(model, batch=(torch.ones(2, 4), torch.tensor([0, 1])))
    >>> found, found.sure, found.found_by
    ('2', True, 'a batch')
    >>> guessed = find_head(model)
    >>> guessed, guessed.sure, guessed.found_by
    ('2', False, 'its position: the last linear layer')
    """
    if batch is None:
        return guess_head(model, name)
    with running(model, device, alone=True) as ready:
        head = find(ready.model, split_batch(batch, ready.model, ready.device), name)
    if head.obstacle:
        raise UserError(f"{type(ready.model).__name__} has no head to fold into: {head.obstacle}")
    return HeadName(head.layers[-1], "a batch", sure=True, layers=head.layers)
