"""Which samples of its data set a loader gives: each once, some more often than others, or a part for each process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from longtail.backbones.inference import BATCH
from longtail.core.random_state import random_state_kept
from longtail.data.counts import training_labels
from longtail.data.worker_processes import quiet_about_workers
from longtail.errors import UserError

MANY_TIMES = 20  # a sampler that draws more than so many times the data set is taken for endless


@dataclass(frozen=True)
class Order:
    """What is known of the samples that a loader shows to this process.

    Args:
        shards: number of processes that the sampler divides the samples among.
        positions: (n,) place in the data set of each row, if it can be told beforehand.
        support: places in the data set that the loader draws from; None where they cannot be told.
        uneven: whether some samples come more or less often than once.
        short: whether an incomplete last batch is left out.
        dataset: the data set.
    """

    shards: int = 1
    positions: np.ndarray | None = None
    support: np.ndarray | None = None
    uneven: bool = False
    short: bool = False
    dataset: Any = None


def is_hugging_face(data: Any) -> bool:
    """Whether this is a data set of the library `datasets`, in memory or a stream."""
    return hasattr(data, "with_format") and hasattr(data, "iter")


def as_batches(loader: Any) -> Iterable[Any]:
    """Batches of a loader, of a list of batches, of a Hugging Face data set or of a torch `Dataset`."""
    if is_hugging_face(loader):
        return loader.with_format("torch").iter(batch_size=BATCH)
    if isinstance(loader, Dataset):
        return DataLoader(loader, BATCH)
    if not isinstance(loader, Iterable) or isinstance(loader, str | Mapping | torch.Tensor):
        raise UserError(f"a {type(loader).__name__} gives no batches; pass a DataLoader or a list of batches")
    return _Read(loader) if isinstance(loader, DataLoader) else loader


@dataclass(frozen=True)
class _Read:
    """The batches of a loader; torch has warned about its workers when it was made, and does not when it is read."""

    loader: DataLoader[Any]

    def __iter__(self) -> Iterator[Any]:
        with quiet_about_workers():
            return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def order_of(loader: Any) -> Order:
    """What is known about the samples of a loader without reading them."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or hasattr(loader, "split_batches"):
        return Order()  # the last: one process reads and deals out batches, as accelerate can do
    batches = loader.batch_sampler
    # A loader that was given its batch sampler has another sampler of its own, which it does not use.
    sampler = loader.sampler if batches is None else batches.sampler if type(batches) is BatchSampler else batches
    shards = _shards(sampler)
    first, second = (_drawn(sampler, dataset, seed) for seed in (1, 2))
    if first is None or second is None:
        return Order(shards, uneven=True, dataset=dataset)
    once = len(np.unique(first)) == len(first)
    same = shards > 1 or np.array_equal(np.unique(first), np.unique(second))
    kept = len(first)
    if type(batches) is BatchSampler and batches.drop_last:
        kept -= kept % batches.batch_size
    return Order(
        shards=shards,
        positions=first[:kept] if np.array_equal(first, second) else None,
        support=np.unique(first) if once and same and shards == 1 else _weighted(sampler, dataset),
        uneven=not (once and same),
        short=kept < len(first) or getattr(sampler, "drop_last", False) is True,
        dataset=dataset,
    )


def shows_all(loader: DataLoader[Any]) -> bool:
    """Whether a loader draws from its whole data set, no sample more often than another in the long run."""
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else None
    if type(sampler) in (SequentialSampler, RandomSampler):  # RandomSampler may take a part, another one each time
        return len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type, union-attr]
    order = order_of(loader)
    return not order.uneven and order.support is not None and len(order.support) == len(loader.dataset)  # type: ignore[arg-type]


def _shards(sampler: Any) -> int:
    """The number of processes that a sampler of torch, Lightning or accelerate divides the samples among."""
    for place in (sampler, getattr(sampler, "sampler", None)):
        for name in ("num_replicas", "num_processes"):
            if isinstance(number := getattr(place, name, None), int):
                return number
    return 1


def _drawn(sampler: Any, dataset: Any, seed: int) -> np.ndarray | None:
    """The places in the data set that a copy of the sampler draws after this seed; None if that cannot be tried."""
    with random_state_kept():
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            drawn = iter(copy.deepcopy(sampler, {id(dataset): dataset}))
            most = MANY_TIMES * len(dataset) + 1
            listed = list(islice(chain.from_iterable(np.atleast_1d(np.asarray(item)) for item in drawn), most))
        except Exception:  # code of others is only tried here: its errors appear when it is used
            return None
    places = np.asarray(listed)
    return places if len(places) < most and places.dtype.kind in "iu" else None


def _weighted(sampler: Any, dataset: Any) -> np.ndarray | None:
    """The places that a sampler with weights can draw, or one that was given the data set itself."""
    weights = getattr(sampler, "weights", None)
    if weights is not None:
        return np.flatnonzero(np.asarray(weights) > 0)
    given = getattr(sampler, "dataset", None)
    return np.arange(len(given)) if given is not None and given is dataset else None


def training_counts(order: Order, labels: np.ndarray, classes: int) -> np.ndarray:
    """(K,) samples per class of the set that a loader draws from, given the labels (N,) that it showed."""
    seen = np.bincount(labels, minlength=classes)
    if not order.uneven and not order.short:
        return seen
    counted = order.uneven or order.support is not None
    known = training_labels(order.dataset) if counted else None
    if known is not None and order.support is not None:
        known = known[order.support]
    if known is not None and known.min() >= 0 and known.max() < classes:
        counts = np.bincount(known, minlength=classes)
        if (counts[seen > 0] > 0).all():
            return counts
    if not order.uneven:
        return seen
    raise UserError(
        "the loader shows some samples more often than others, so its labels do not tell how many training samples a "
        f"class has (it showed {', '.join(map(str, seen[:6]))}{', …' if classes > 6 else ''}); pass class_counts="
    )
