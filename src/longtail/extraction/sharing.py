"""Joins the rows of several processes to one set, the same on each of them.

What each process was shown decides how: a part of the samples by a distributed sampler (its padding, samples that
come twice so that the parts are equal, is dropped by their places in the data set), a part in another way, or all of
the samples. Where it cannot be told, that is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.extraction.loaders import Order
from longtail.outputs.rows import LogitRows
from longtail.outputs.writer import RowWriter, join_parts, remove_parts

CHUNK = 8192


@dataclass(frozen=True)
class Summary:
    """The description of its rows that a process sends to the others."""

    rows: int
    shards: int
    positions: np.ndarray | None
    per_class: np.ndarray
    mean: np.ndarray
    spread: float


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
    told = world.gather(str(failed) if failed is not None else None)
    if failed is not None:
        raise failed
    for rank, message in enumerate(told):
        if message is not None:
            raise UserError(f"process {rank}: {message}")


def row_numbers(order: Order, arrays: dict[str, np.ndarray], world: World) -> np.ndarray:
    """(n,) the number of each row of this process among the rows of all; -1 for a row that another has too."""
    positions = order.positions
    if positions is not None and len(positions) != len(arrays["labels"]):
        positions = None  # samples were left out on the way: whose places these are is not known
    if world.size == 1:
        return np.arange(len(arrays["labels"]))
    told: list[Summary] = world.gather(_summary(arrays, order.shards, positions))
    if any(summary.shards > 1 for summary in told):
        places = [summary.positions for summary in told]
        if any(place is None for place in places):
            _warn(world, "the order of its sampler cannot be told beforehand")
            return _one_after_another(told, world)
        return first_of_each([place for place in places if place is not None])[world.rank]
    if _alike(told):
        return np.arange(told[0].rows) if world.is_main else np.full(told[world.rank].rows, -1)
    _warn(world, "it has no distributed sampler")
    return _one_after_another(told, world)


def first_of_each(places: list[np.ndarray]) -> list[np.ndarray]:
    """The places of each process with -1 for those that came before, in it or in an earlier one.

    >>> first_of_each([np.array([0, 2, 4]), np.array([1, 3, 0])])
    [array([0, 2, 4]), array([ 1,  3, -1])]
    """
    everything = np.concatenate(places)
    kept = np.full(len(everything), -1)
    _, first = np.unique(everything, return_index=True)
    kept[first] = everything[first]
    return np.split(kept, np.cumsum([len(place) for place in places])[:-1])


def joined(arrays: dict[str, np.ndarray], numbers: np.ndarray, world: World) -> dict[str, np.ndarray]:
    """The rows of all processes in the order of their numbers, with those as `indices`."""
    if world.size == 1:
        return {**arrays, "indices": numbers}
    kept = numbers >= 0
    parts = world.gather({**{name: values[kept] for name, values in arrays.items()}, "indices": numbers[kept]})
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(whole["indices"])
    return {name: values[order] for name, values in whole.items()}


def join_files(
    path: Path,
    arrays: dict[str, np.ndarray],
    numbers: np.ndarray,
    constant: dict[str, np.ndarray],
    details: dict[str, Any],
    world: World,
) -> None:
    """Write the rows of all processes into one file, in the order of their numbers."""
    kept = np.flatnonzero(numbers >= 0)
    widths = {name: arrays[name].shape[1] if name in arrays else None for name in ("features", "logits")}
    remove_parts(path, world)
    world.barrier()
    with RowWriter(path, len(kept), widths, arrays["logits"].dtype, constant, details, world) as writer:
        for start in range(0, len(kept), CHUNK):
            rows = kept[start : start + CHUNK]
            named = {name: torch.from_numpy(values[rows]) for name, values in arrays.items()}
            features = named.get("features", torch.empty(len(rows), 0))
            writer.add(features, named["logits"], named["labels"], torch.from_numpy(numbers[rows]))
    everyone = world.gather((len(kept), int(numbers.max(initial=-1))))
    places = np.arange(1 + max(last for _, last in everyone))
    join_parts(path, world, sum(count for count, _ in everyone), places)


def _summary(arrays: dict[str, np.ndarray], shards: int, positions: np.ndarray | None) -> Summary:
    size, classes = arrays["logits"].shape
    sums = torch.zeros(2, classes, dtype=torch.float64)
    for _, chunk in LogitRows(arrays["logits"]).chunks():
        sums += torch.stack([chunk.double().sum(0), chunk.double().square().sum(0)])
    mean, square = (sums / size).numpy()
    labels = np.bincount(np.clip(arrays["labels"], 0, classes - 1), minlength=classes)
    return Summary(size, shards, positions, labels, mean, float(np.sqrt(np.maximum(square - mean**2, 0).mean())))


def _alike(told: list[Summary]) -> bool:
    """Whether every process had all of the samples, in any order."""
    first = told[0]
    if any(other.rows != first.rows or (other.per_class != first.per_class).any() for other in told):
        return False
    if all(float(np.abs(other.mean - first.mean).max()) <= 1e-4 * first.spread for other in told):
        return True
    raise UserError(
        "every process was shown as many samples of each class, but not the same images: parts of the set, or the set "
        "augmented anew on each? Use a DataLoader with a DistributedSampler, or show the same images everywhere"
    )


def _one_after_another(told: list[Summary], world: World) -> np.ndarray:
    first = sum(summary.rows for summary in told[: world.rank])
    return np.arange(first, first + told[world.rank].rows)


def _warn(world: World, why: str) -> None:
    if world.is_main:
        warnings.warn(
            f"each process was shown other samples; they are put together, but {why}: a sample that two processes were "
            "shown counts twice. A DataLoader with a DistributedSampler is counted exactly",
            stacklevel=2,
        )
