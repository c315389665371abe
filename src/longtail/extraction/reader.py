"""What a model says about a batch: the logits it answers with, and the features before its head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtail.core.random_state import random_state_kept
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.extraction.batches import Batch
from longtail.networks.head_folding import joined_head
from longtail.networks.head_layers import one_vector_each, watching
from longtail.networks.head_search import Head, search

FEW = 32  # samples that show what a model is made of


@dataclass(frozen=True)
class Said:
    """What a model says about a batch: logits (N, K) and, where its head sees one vector per sample, features (N, D).

    The features of several heads stand side by side.
    """

    logits: Tensor
    features: Tensor | None

    def arrays(self) -> dict[str, np.ndarray]:
        """Both on the CPU, in single precision."""
        known = {"logits": self.logits, "features": self.features}
        return {name: value.float().cpu().numpy() for name, value in known.items() if value is not None}


def find(model: nn.Module, batch: Batch, only: str | None = None) -> Head:
    """What the answer of a model is made of, by its answer to some samples of a batch."""
    few = batch.first(FEW)

    def run() -> Any:
        with random_state_kept():
            return model(*few.inputs, **few.named)

    try:
        run()
    except NotImplementedError as error:
        inside = ", ".join(name for name, _ in model.named_children())
        raise UserError(
            f"{type(model).__name__} has no forward that gives logits; write one, or pass the network inside it "
            f"(its parts: {inside or 'none'})"
        ) from error
    except Exception as error:
        raise UserError(f"{type(model).__name__} fails on the first batch: {type(error).__name__}: {error}") from error
    return search(model, run, len(few), only)


def read(model: nn.Module, head: Head, batch: Batch) -> Said:
    """Run a batch through the model."""
    layers = {path: model.get_submodule(path) for path in head.layers}
    with watching(layers) as seen:
        answer = model(*batch.inputs, **batch.named)
    answered = head.form == "logits"
    logits = head.place.read(answer).detach() if answered else seen[head.layers[0]][-1][1].flatten(1)
    if len(logits) != len(batch):
        raise UserError(f"{type(model).__name__} gives {len(logits)} rows of logits for {len(batch)} labels")
    if not head.has_features:
        return Said(logits, None)
    found = [one_vector_each(layer, seen[path], len(batch)) for path, layer in layers.items()]
    features = [one for one in found if one is not None]
    if len(features) < len(found):
        raise UserError(f"{', '.join(layers)} sees one vector per sample in the first batch, but not in another")
    return Said(logits, features[0] if len(features) == 1 else torch.cat([one.float() for one in features], 1))


def head_arrays(model: nn.Module, head: Head) -> dict[str, np.ndarray]:
    """Weight and bias of the linear layer that gives the answer, as arrays; none where nothing folds."""
    if head.obstacle:
        return {}
    linear = joined_head([model.get_submodule(path) for path in head.layers], head.gains)
    arrays = {"head_weight": linear.weight.detach().float().numpy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().numpy()
    return arrays


def in_step(batches: Iterable[Any], world: World) -> Iterator[tuple[Any, bool]]:
    """Batches, and whether each is new: a process whose batches have ended shows its last until all have."""
    known = iter(batches)
    last = None
    while True:
        batch = next(known, None)
        if not any(world.gather(batch is not None)):
            return
        if batch is None and last is None:
            raise UserError("the loader gave no batches")
        yield (last if batch is None else batch), batch is not None
        last = last if batch is None else batch
