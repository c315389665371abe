"""Finds the classifier layer of any model: by running a batch, or as a guess from names."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtail.errors import UserError
from longtail.extraction.batches import split_batch
from longtail.extraction.reader import find
from longtail.extraction.running import running
from longtail.networks.head import HeadName, guess_head


def find_head(model: nn.Module, name: str | None = None, *, batch: Any = None, device: str = "auto") -> HeadName:
    """The name of the layer that produces the logits of a model, for `model.get_submodule`.

    With a batch, the model is run to find the layer. Without one, the result is a guess from names and positions: it
    may be wrong, and its attribute `sure` is False.

    Args:
        model: any model.
        name: the layer, or a part of the model that contains it, if you know it.
        batch: a batch of a loader, (inputs, labels) or a dictionary with labels.
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
