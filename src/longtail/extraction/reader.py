"""Reads the logits of a model for a batch, and the features before its head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtail.core.random_state import random_state_kept
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.extraction.batches import Batch
from longtail.networks.head_account import accounted, alike, holds, scale_and_shift
from longtail.networks.head_folding import joined_head
from longtail.networks.head_layers import changed, one_vector_each, watching
from longtail.networks.head_search import Head, search
from longtail.networks.sharded import whole

FEW = 32  # samples with which the head is searched


@dataclass(frozen=True)
class Said:
    """What a model says about a batch: logits (N, K) and, where its head sees one vector per sample, features (N, D).

    The features of several heads stand side by side.
    """

    logits: Tensor
    features: Tensor | None
    explained: bool = True
    """Whether the head gives the answer, as it does for the first samples."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Both on the CPU, in single precision."""
        known = {"logits": self.logits, "features": self.features}
        return {name: value.float().cpu().numpy() for name, value in known.items() if value is not None}


def find(model: nn.Module, batch: Batch, only: str | None = None) -> Head:
    """What the answer of a model is made of, by its answer to some samples of a batch."""
    few = batch.only(slice(FEW))

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
    """Run a batch through the model, and check that its head gives its answer for this batch too."""
    layers = {path: model.get_submodule(path) for path in head.layers}

    def run() -> Tensor:
        with random_state_kept() if head.way == "again" else nullcontext():
            return whole(head.place.read(model(*batch.inputs, **batch.named)))

    with watching(layers) as seen:
        answer = run()
    if len(answer) != len(batch):
        raise UserError(f"{type(model).__name__} gives {len(answer)} rows of logits for {len(batch)} labels")
    if not layers:
        return Said(answer, None)
    if head.way == "again":
        with changed(list(layers.values()), *scale_and_shift(answer)):
            moved = run()
        torch.rand(())  # the next batch draws other random numbers
        explained, logits = holds(answer, sum(head.gains), lambda *change: moved, head.formed), answer
    else:
        given = accounted(head.way, layers, head.gains, seen, answer)
        explained = given is not None and _alike_where_finite(head.formed(given), answer)
        logits = answer if head.form == "logits" or given is None else given
    found = [one_vector_each(layer, seen[path], len(batch)) for path, layer in layers.items()]
    features = [one for one in found if one is not None]
    if not explained or (head.has_features and len(features) < len(found)):
        return Said(answer, None, explained=False)
    if not head.has_features:
        return Said(logits, None)
    return Said(logits, features[0] if len(features) == 1 else torch.cat([one.float() for one in features], 1))


def _alike_where_finite(given: Tensor, answer: Tensor) -> bool:
    """Whether two outputs are the same; rows that are not finite are named by the check of the logits."""
    rows = answer.isfinite().all(1)
    return not bool(rows.any()) or (given.shape == answer.shape and alike(given[rows], answer[rows]))


def unexplained(model: nn.Module, head: Head) -> Head:
    """The head of a model that computes the output of some samples in another way than that of the first ones."""
    layers = ", ".join(head.layers)
    if head.form != "logits":
        raise UserError(
            f"{type(model).__name__} returns the {head.form} of the output of {layers} for the first samples, but not "
            "for others (an early exit, or a branch that depends on the input?), so their logits are not known; return "
            "the logits"
        )
    return Head(
        head.place,
        obstacle=f"its output comes from {layers} for the first samples, but not for others (an early exit, a clamp, "
        "or a branch that depends on the input?)",
    )


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
