"""Which samples of its data set a loader gives: each once, some more often than others, or a shard per process.

`loader_of` gives some samples of a data set alone: no others are read, decoded or run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from longtail.backbones import BATCH
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.labels import dataset_labels, training_labels
from longtail.data.loading import Batch, Draw, in_order, load, quiet_about_workers
from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.files.tensors import random_state_kept

MOST_REPEATS = 20  # a sampler that draws more than so many times the data set is taken for endless


@dataclass(frozen=True)
class ImageLoader:
    """Batches (images, labels) of a split in order; whole batches are dealt out to the processes in turn."""

    images: Images  # M images
    transform: Transform  # applied to them, on the device of `world`
    rows: np.ndarray | None = None  # (M,) their indices in the split, if they are a subset
    split_size: int | None = None  # number of images of the split; M if None
    passes: int = 1  # how often they are read; with an augmenting transform each pass is augmented anew
    world: World = SINGLE_PROCESS  # the processes that share the batches
    workers: int = 0  # processes that decode images

    def __len__(self) -> int:
        return self.passes * len(range(self.world.rank, -(-len(self.images) // BATCH), self.world.size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((batch.images, batch.labels) for batch in self.batches())

    def batches(self) -> Iterator[Batch]:
        """The batches with `indices` that go on through the passes: 0 to M - 1 in the first, M to 2M - 1, …"""
        size, world = len(self.images), self.world
        rows = np.arange(size) if self.rows is None else self.rows
        plan: list[tuple[int, Draw]] = []
        for number in range(self.passes):
            # An image is augmented alike whether all images of the split are read or some of them.
            numbers = number * (self.split_size or size) + rows
            draws = in_order(size, BATCH, numbers=numbers, rank=world.rank, world_size=world.size)
            plan += [(number, draw) for draw in draws]
        draws_only = (draw for _, draw in plan)
        loaded = load(self.images, self.transform, draws_only, workers=self.workers, device=world.device)
        for (number, _), batch in zip(plan, loaded, strict=True):
            yield Batch(batch.images, batch.labels, number * size + batch.indices)


@dataclass(frozen=True)
class SamplerInfo:
    """Which samples a loader gives to this process."""

    shards: int = 1  # number of processes that the sampler divides the samples among
    positions: np.ndarray | None = None  # (n,) index in the data set of each row, if it is known before reading
    support: np.ndarray | None = None  # indices that the loader draws from, if they are known
    uneven: bool = False  # whether some samples come more or less often than once
    short: bool = False  # whether an incomplete last batch is left out
    dataset: Any = None


def sampler_info(loader: Any) -> SamplerInfo:
    """Which samples a loader gives, without reading them."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or hasattr(loader, "split_batches"):
        return SamplerInfo()  # the last: one process reads and deals out batches, as accelerate can do
    batches = loader.batch_sampler
    # A loader that was given its batch sampler has another sampler, which it does not use.
    sampler = loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else batches
    names = ("num_replicas", "num_processes")  # of torch and Lightning, of accelerate
    owners = (sampler, getattr(sampler, "sampler", None))
    numbers = [getattr(owner, name, None) for owner in owners for name in names]
    shards = next((number for number in numbers if isinstance(number, int)), 1)
    first, second = (_drawn(sampler, dataset, seed) for seed in (1, 2))
    if first is None or second is None:
        return SamplerInfo(shards, uneven=True, dataset=dataset)
    once = len(np.unique(first)) == len(first)
    same = shards > 1 or np.array_equal(np.unique(first), np.unique(second))
    kept = len(first)
    if type(batches) is BatchSampler and batches.drop_last:
        kept -= kept % batches.batch_size
    return SamplerInfo(
        shards=shards,
        positions=first[:kept] if np.array_equal(first, second) else None,
        support=np.unique(first) if once and same and shards == 1 else _weighted(sampler, dataset),
        uneven=not (once and same),
        short=kept < len(first) or getattr(sampler, "drop_last", False) is True,
        dataset=dataset,
    )


def _drawn(sampler: Any, dataset: Any, seed: int) -> np.ndarray | None:
    """The indices that a copy of the sampler draws with this seed; None if it cannot be copied or does not end."""
    with random_state_kept():
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            drawn = iter(copy.deepcopy(sampler, {id(dataset): dataset}))
            most = MOST_REPEATS * len(dataset) + 1
            items = (np.atleast_1d(np.asarray(item)) for item in drawn)
            indices = np.asarray(list(islice(chain.from_iterable(items), most)))
        except Exception:  # code of others is only tried here: its errors appear when it is used
            return None
    return indices if len(indices) < most and indices.dtype.kind in "iu" else None


def _weighted(sampler: Any, dataset: Any) -> np.ndarray | None:
    """The indices that a sampler with weights can draw, or one that was given the data set itself."""
    weights = getattr(sampler, "weights", None)
    if weights is not None:
        return np.flatnonzero(np.asarray(weights) > 0)
    given = getattr(sampler, "dataset", None)
    return np.arange(len(given)) if given is not None and given is dataset else None


def training_counts(info: SamplerInfo, labels: np.ndarray, classes: int) -> np.ndarray:
    """(K,) samples per class of the set that a loader draws from, given the labels (N,) that it gave."""
    seen = np.bincount(labels, minlength=classes)
    if not info.uneven and not info.short:
        return seen
    of_all = training_labels(info.dataset) if info.uneven or info.support is not None else None
    if of_all is not None and info.support is not None:
        of_all = of_all[info.support]
    if of_all is not None and of_all.min() >= 0 and of_all.max() < classes:
        counts = np.bincount(of_all, minlength=classes)
        if (counts[seen > 0] > 0).all():
            return counts
    if not info.uneven:
        return seen
    raise UserError(
        "the loader shows some samples more often than others, so its labels do not tell how many training samples a "
        f"class has (it showed {', '.join(map(str, seen[:6]))}{', …' if classes > 6 else ''}); pass class_counts="
    )


WITHOUT = "pass a data set with its labels in .targets, or a DataLoader of one, or images_per_class='all'"


def listed_labels(loader: Any) -> np.ndarray:
    """Labels (N,) of all samples of a loader's data set, without reading the samples."""
    data = _data_set(loader)
    labels = dataset_labels(data)
    if labels is None:
        raise UserError(
            f"the labels of a {type(data).__name__} are not known before it is read, or are not one class number per "
            f"sample; {WITHOUT}"
        )
    if not len(labels):
        raise UserError(f"a {type(data).__name__} without samples has none to choose")
    if labels.min() < 0:
        index = int(labels.argmin())
        raise UserError(f"sample {index} has the label {labels[index]}, but classes are numbered from 0 on")
    return labels


def loader_of(loader: Any, rows: np.ndarray) -> DataLoader[Any]:
    """Batches of the samples at `rows` alone, read as the loader reads them."""
    data = _data_set(loader)
    chosen: Subset[Any] = Subset(data.with_format("torch") if hasattr(data, "with_format") else data, rows.tolist())
    if not isinstance(loader, DataLoader):
        return DataLoader(chosen, BATCH)
    with quiet_about_workers():
        return DataLoader(
            chosen,
            loader.batch_size or BATCH,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )


def _data_set(loader: Any) -> Any:
    """The data set behind a loader, if samples can be taken from it by their number, and the loader gives them all."""
    data: Any = loader.dataset if isinstance(loader, DataLoader) else loader
    mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple)
    if isinstance(data, IterableDataset) or not mapped:
        raise UserError(f"a {type(data).__name__} cannot skip samples, it gives one after another; {WITHOUT}")
    if not isinstance(loader, DataLoader):
        return data
    info, reason = sampler_info(loader), ""
    if loader.batch_sampler is None:
        reason = "the loader has no batch size, so images per class cannot be chosen of its samples"
    elif info.uneven or info.support is None or len(info.support) != len(data):
        inner = type(getattr(loader.batch_sampler, "sampler", loader.batch_sampler)).__name__
        reason = f"the loader draws its samples with a {inner}, which does not show every sample once"
    if reason:
        raise UserError(f"{reason}; pass the data set itself, or images_per_class='all'")
    return data
