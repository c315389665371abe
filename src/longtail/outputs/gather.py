"""Joins the rows of several processes to one set, the same on each of them.

Which samples each process had decides how: shards of a distributed sampler (its padding, samples that come twice so
that the shards are equal, is dropped by their indices in the data set), other shards, or all of the samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from longtail.distributed import World
from longtail.errors import UserError
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
        labels = np.bincount(np.clip(arrays["labels"], 0, classes - 1), minlength=classes)
        return cls(size, shards, positions, labels, mean, float(np.sqrt(np.maximum(square - mean**2, 0).mean())))


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
