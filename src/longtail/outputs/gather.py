"""Joins the rows of several processes to one set, the same on each of them.

Which samples each process had decides how: shards of a distributed sampler (its padding, samples that come twice so
that the shards are equal, is dropped by their indices in the data set), other shards, or all of the samples.

Collective calls of `torch.distributed` wait for every process. If only one process of the caller's group called the
library, it would wait for ever. So the processes meet in the group's store before the first collective call. A process
enters a meeting, or gives up waiting, in one atomic step: either all take part or none of them does.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from longtail.distributed import World, collective_seconds
from longtail.errors import UserError
from longtail.launch import POLL_SECONDS, joining_seconds, not_joined
from longtail.outputs.loaders import SamplerInfo
from longtail.outputs.rows import LogitRows


@dataclass(frozen=True)
class Summary:
    """The description of its rows that a process sends to the others."""

    rows: int
    shards: int
    positions: np.ndarray | None
    per_class: np.ndarray
    mean: np.ndarray
    spread: float

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], shards: int, positions: np.ndarray | None) -> Summary:
        size, classes = arrays["logits"].shape
        sums = torch.zeros(2, classes, dtype=torch.float64)
        for _, chunk in LogitRows(arrays["logits"]).chunks():
            sums += torch.stack([chunk.double().sum(0), chunk.double().square().sum(0)])
        mean, square = (sums / size).numpy()
        labels = arrays["labels"]
        per_class = (
            np.bincount(np.clip(labels, 0, classes - 1), minlength=classes) if labels.ndim == 1 else labels.sum(0)
        )
        return cls(size, shards, positions, per_class, mean, float(np.sqrt(np.maximum(square - mean**2, 0).mean())))


@contextmanager
def sharing_errors(world: World, *, off: bool = False) -> Iterator[None]:
    """A block without collective calls: an error of one process is raised in all, so that none waits for another."""
    if world.size == 1 or off:
        yield
        return
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
    if world.size == 1:
        return np.arange(len(arrays["labels"]))
    positions = info.positions
    if positions is not None and len(positions) != len(arrays["labels"]):
        positions = None  # samples were left out on the way, so which positions remain is unknown
    summaries: list[Summary] = world.gather(Summary.of(arrays, info.shards, positions))
    if any(summary.shards > 1 for summary in summaries):
        of_all = [summary.positions for summary in summaries]
        if any(positions is None for positions in of_all):
            _warn(world, "the order of its sampler is not known before it is read")
            return _one_after_another(summaries, world)
        return first_of_each([positions for positions in of_all if positions is not None])[world.rank]
    if _all_alike(summaries):
        return np.arange(summaries[0].rows) if world.is_main else np.full(summaries[world.rank].rows, -1)
    _warn(world, "it has no distributed sampler")
    return _one_after_another(summaries, world)


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
    if world.size == 1:
        return {**arrays, "indices": numbers}
    kept = numbers >= 0
    shards = world.gather({**{name: values[kept] for name, values in arrays.items()}, "indices": numbers[kept]})
    rows = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    order = np.argsort(rows["indices"])
    return {name: values[order] for name, values in rows.items()}


def _all_alike(summaries: list[Summary]) -> bool:
    """Whether every process had all of the samples, in any order."""
    first = summaries[0]
    if any(other.rows != first.rows or (other.per_class != first.per_class).any() for other in summaries):
        return False
    if all(float(np.abs(other.mean - first.mean).max()) <= 1e-4 * first.spread for other in summaries):
        return True
    raise UserError(
        "every process was shown as many samples of each class, but not the same images: parts of the set, or the set "
        "augmented anew on each? Use a DataLoader with a DistributedSampler, or show the same images everywhere"
    )


def _one_after_another(summaries: list[Summary], world: World) -> np.ndarray:
    first = sum(summary.rows for summary in summaries[: world.rank])
    return np.arange(first, first + summaries[world.rank].rows)


def _warn(world: World, why: str) -> None:
    if world.is_main:
        warnings.warn(
            f"each process was shown other samples; they are put together, but {why}: a sample that two processes were "
            "shown counts twice. A DataLoader with a DistributedSampler is counted exactly",
            stacklevel=2,
        )


KEY = "longtail/meeting"


class Meeting(NamedTuple):
    """The meeting that processes can enter now.

    Args:
        number: meetings in which all processes met before this one.
        waiting: ranks that wait in this one.
        busy: ranks that have not finished the work of the last one.
    """

    number: int = 0
    waiting: Sequence[int] = ()
    busy: Sequence[int] = ()

    def entered(self, rank: int, size: int) -> Meeting:
        waiting = sorted({*self.waiting, rank})
        if len(waiting) == size:
            return Meeting(self.number + 1, busy=waiting)
        return self.left(rank)._replace(waiting=waiting)

    def left(self, rank: int) -> Meeting:
        waiting, busy = ([other for other in ranks if other != rank] for ranks in (self.waiting, self.busy))
        return Meeting(self.number, waiting, busy)


@contextmanager
def taking_part(world: World, *, needed: str = "") -> Iterator[World]:
    """The processes that share the work of the block: all of the group, or only this one if no other makes the call.

    Args:
        needed: the reason why all processes must make the call; empty if one process can work alone.
    """
    if world.size == 1:
        yield world
        return
    store = dist.distributed_c10d._get_default_store()
    together = _meet(world, store, needed)
    try:
        yield world if together else World(0, 1, world.device)
    finally:
        if together:
            change(store, lambda now: now.left(world.rank))


def _meet(world: World, store: Any, needed: str) -> bool:
    """Whether all processes have met; otherwise this one may work alone."""
    number = change(store, lambda now: now.entered(world.rank, world.size)).number
    try:
        others = _wait(store, number)
    finally:  # give up, unless all have met by now
        last = change(store, lambda now: now.left(world.rank) if now.number == number else now)
    if last.number > number:
        return True
    others = (others | {*last.waiting}) - {world.rank}
    if not others and not needed:
        return False
    missing = min({*range(world.size)} - others - {world.rank} or {*range(world.size)} - {*last.waiting})
    why = needed or "some of the processes made this call, others did not"
    raise UserError(
        f"{not_joined(world.size)}: process {missing} has not made this call, says process {world.rank}; {why}: make "
        "the call on every process (LONGTAIL_JOIN_TIMEOUT sets how long to wait)"
    )


def _wait(store: Any, number: int) -> set[int]:
    """Wait until all have met or time is up; returns the ranks that were seen waiting.

    Time does not run while others finish the work of the last meeting.
    """
    seen: set[int] = set()
    started = idle_since = time.monotonic()
    while True:
        clock, meeting = time.monotonic(), change(store, lambda now: now)
        seen |= {*meeting.waiting}
        if meeting.busy and clock < started + collective_seconds():
            idle_since = clock
        if meeting.number > number or clock > idle_since + joining_seconds():
            return seen
        time.sleep(POLL_SECONDS)


def change(store: Any, edit: Callable[[Meeting], Meeting]) -> Meeting:
    """Change the meeting as it is now, whatever others do meanwhile; returns the meeting before."""
    text = store.compare_set(KEY, "", json.dumps(Meeting()))
    while True:
        before = Meeting(*json.loads(text))
        wanted = json.dumps(edit(before)).encode()
        if wanted == text:
            return before
        result = store.compare_set(KEY, text.decode(), wanted.decode())
        if result == wanted:
            return before
        text = result
