"""Several processes of the caller's group: which of them take part, and how their rows become one set.

Which samples each process had decides how they are joined: shards of a distributed sampler (its padding, samples that
come twice so that the shards are equal, is dropped by their indices in the data set), other shards, or all samples.

Collective calls of `torch.distributed` wait for every process. If only one process of the caller's group called the
library, it would wait for ever. So the processes meet in the group's store before the first collective call. A process
enters a meeting, or gives up waiting, in one atomic step: either all take part or none of them does.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from longtail.distributed import World
from longtail.errors import UserError
from longtail.heads.find import Head
from longtail.launch import POLL_SECONDS, join_timeout, not_joined
from longtail.outputs.loaders import SamplerInfo
from longtail.outputs.record import hash_of
from longtail.outputs.rows import LogitRows


@contextmanager
def sharing_errors(world: World) -> Iterator[None]:
    """A block without collective calls: an error of one process is raised in all, so that none waits for another."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    messages = world.gather(str(failed) if failed is not None else None)
    if failed is not None:
        raise failed
    for rank, message in enumerate(messages):
        if message is not None:
            raise UserError(f"process {rank}: {message}")


def row_numbers(info: SamplerInfo, arrays: dict[str, np.ndarray], world: World) -> np.ndarray:
    """(n,) the number of each row of this process among the rows of all; -1 for a row that another has too."""
    size, positions = len(arrays["labels"]), info.positions
    if positions is not None and len(positions) != size:
        positions = None  # samples were left out on the way, so which positions remain is unknown
    shards: list[tuple[int, np.ndarray | None, int]] = world.gather((info.shards, positions, size))
    if any(number > 1 for number, _, _ in shards):
        of_all = [positions for _, positions, _ in shards if positions is not None]
        if len(of_all) == len(shards):
            return first_of_each(of_all)[world.rank]
        why = "the order of its sampler is not known before it is read"
    elif _same_samples(arrays, world):
        return np.arange(size) if world.is_main else np.full(size, -1)
    else:
        why = "it has no distributed sampler"
    if world.is_main:
        warnings.warn(
            f"each process was shown other samples; they are put together, but {why}: a sample that two processes were "
            "shown counts twice. A DataLoader with a DistributedSampler is counted exactly",
            stacklevel=2,
        )
    first = sum(size for _, _, size in shards[: world.rank])
    return np.arange(first, first + size)


def _same_samples(arrays: dict[str, np.ndarray], world: World) -> bool:
    """Whether every process had all of the samples, in any order: equal class counts, and means of the logits."""
    logits, labels = LogitRows(arrays["logits"]), arrays["labels"]
    sums = torch.zeros(2, logits.shape[1], dtype=torch.float64)
    for _, chunk in logits.chunks():
        sums += torch.stack([chunk.double().sum(0), chunk.double().square().sum(0)])
    mean, square = (sums / len(labels)).numpy()
    counts = np.bincount(np.maximum(labels, 0)).tolist() if labels.ndim == 1 else [len(labels), *labels.sum(0).tolist()]
    described = world.gather((counts, mean, float(np.sqrt(np.maximum(square - mean**2, 0).mean()))))
    first, first_mean, spread = described[0]
    if any(other != first for other, _, _ in described):
        return False
    if all(float(np.abs(other - first_mean).max()) <= 1e-4 * spread for _, other, _ in described):
        return True
    raise UserError(
        "every process was shown as many samples of each class, but not the same images: parts of the set, or the set "
        "augmented anew on each? Use a DataLoader with a DistributedSampler, or show the same images everywhere"
    )


def first_of_each(positions: list[np.ndarray]) -> list[np.ndarray]:
    """The positions of each process with -1 for those that came before, in it or in an earlier one.

    >>> first_of_each([np.array([0, 2, 4]), np.array([1, 3, 0])])
    [array([0, 2, 4]), array([ 1,  3, -1])]
    """
    everything = np.concatenate(positions)
    kept = np.full(len(everything), -1)
    _, first = np.unique(everything, return_index=True)
    kept[first] = everything[first]
    return np.split(kept, np.cumsum([len(one) for one in positions])[:-1])


def joined(arrays: dict[str, np.ndarray], numbers: np.ndarray, world: World) -> dict[str, np.ndarray]:
    """The rows of all processes in the order of their numbers, with those as `indices`."""
    kept = numbers >= 0
    shards = world.gather({**{name: values[kept] for name, values in arrays.items()}, "indices": numbers[kept]})
    rows = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    order = np.argsort(rows["indices"])
    return {name: values[order] for name, values in rows.items()}


@contextmanager
def same_weights(model: nn.Module, world: World) -> Iterator[None]:
    """Buffers as process 0 has them while the block runs; an error where the parameters are not the same.

    DistributedDataParallel keeps parameters equal. Statistics of batch-norm are those of each process until the
    next training step; what is saved and served are those of process 0.
    """
    hashes = world.gather((hash_of(model.named_parameters()), hash_of(model.named_buffers())))
    others = [rank for rank, (parameters, _) in enumerate(hashes) if parameters != hashes[0][0]]
    if others:
        raise UserError(
            f"process {others[0]} holds a model with other weights than process 0; load the same everywhere"
        )
    buffers = list(model.buffers()) if len({digest for _, digest in hashes}) > 1 else []
    before = [buffer.clone() for buffer in buffers]
    world.broadcast(buffers)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def common_head(model: nn.Module, head: Head | None, world: World) -> Head:
    """The head that all processes detected; an obstacle in one process is an obstacle for all."""
    heads: list[Head] = world.gather(head)
    if len({(one.layers, one.form) for one in heads if one.layers}) > 1:
        return next(one for one in heads if one.layers).only_for_first(model)
    return next((one for one in heads if one.obstacle or not one.has_features), heads[0])


KEY = "longtail/meeting"


@contextmanager
def taking_part(world: World, *, needed: str = "") -> Iterator[World]:
    """The processes that share the work of the block: all of the group, or only this one if no other makes the call.

    Args:
        needed: the reason why all processes must make the call; empty if one process can work alone.
    """
    store, rank = dist.distributed_c10d._get_default_store(), world.rank

    def enter(number: int, waiting: list[int]) -> tuple[int, list[int]]:
        waiting = sorted({*waiting, rank})
        return (number, waiting) if len(waiting) < world.size else (number + 1, [])

    number, seen = change_meeting(store, enter)
    try:
        deadline, met = time.monotonic() + join_timeout(), len({*seen, rank}) == world.size
        while not met and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            now, waiting = change_meeting(store, lambda *now: now)
            met, seen = now > number, [*seen, *waiting]
    finally:  # give up, unless all have met by now
        now, waiting = change_meeting(
            store, lambda now, waiting: (now, [other for other in waiting if other != rank or now > number])
        )
    if now > number:
        yield world
        return
    others = {*seen, *waiting} - {rank}
    if others or needed:
        missing = min({*range(world.size)} - others - {rank} or {*range(world.size)} - {*waiting})
        why = needed or "some of the processes made this call, others did not"
        raise UserError(
            f"{not_joined(world.size)}: process {missing} has not made this call, says process {rank}; {why}: make "
            "the call on every process (LONGTAIL_JOIN_TIMEOUT sets how long to wait)"
        )
    yield World(0, 1, world.device)


def change_meeting(store: Any, edit: Callable[[int, list[int]], tuple[int, list[int]]]) -> tuple[int, list[int]]:
    """Change the number of meetings so far and the ranks that wait for the next one; returns them as they were.

    It is one atomic step, whatever other processes do meanwhile.
    """
    text = store.compare_set(KEY, "", "[0, []]")
    while True:
        number, waiting = json.loads(text)
        changed = json.dumps(edit(number, waiting)).encode()
        result = text if changed == text else store.compare_set(KEY, text.decode(), changed.decode())
        if result == changed:
            return number, waiting
        text = result
