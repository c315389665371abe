"""A few images of every class of any data set: only these are read, decoded and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from longtail.backbones.inference import BATCH
from longtail.data.counts import dataset_labels
from longtail.data.imbalance import Few
from longtail.data.worker_processes import quiet_about_workers
from longtail.errors import UserError

WITHOUT = "pass a data set with its labels in .targets, or a DataLoader of one, or images_per_class='all'"


def known_labels(loader: Any) -> np.ndarray:
    """Labels (N,) of all samples of a loader's data set, without reading the samples."""
    data = _data_set(loader)
    labels = dataset_labels(data)
    if labels is None:
        raise UserError(
            f"the labels of a {type(data).__name__} are not known before it is read, or are not one class number per "
            f"sample; {WITHOUT}"
        )
    return labels


def only(loader: Any, rows: np.ndarray) -> DataLoader[Any]:
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


@dataclass(frozen=True)
class Part:
    """A few images of every class: how they are chosen, the labels (N,) of all, and their positions."""

    few: Few
    labels: np.ndarray
    rows: np.ndarray

    def known(self, shown: np.ndarray) -> dict[str, Any]:
        """The fields of the outputs that describe them; raises if the batches had other labels than expected."""
        if not np.array_equal(shown, self.labels[self.rows]):
            raise UserError(
                "the labels in the batches are not those the data set says it has; images_per_class cannot be used"
            )
        return {"indices": self.rows, "images_per_class": self.few.most, "images_seed": self.few.seed}


def few_of(loader: Any, few: Few) -> tuple[DataLoader[Any], Part]:
    """A loader of a few images of every class, and which they are; every process of a group runs all of them."""
    labels = known_labels(loader)
    part = Part(few, labels, few.rows(labels))
    return only(loader, part.rows), part


def _data_set(loader: Any) -> Any:
    """The data set behind a loader, if samples can be taken from it by their number."""
    if isinstance(loader, DataLoader):
        plain = isinstance(loader.sampler, SequentialSampler | RandomSampler) and loader.batch_size is not None
        if not isinstance(loader.dataset, IterableDataset) and not plain:
            raise UserError(
                f"the loader draws its samples with a {type(loader.sampler).__name__}, which a choice of images per "
                "class would undo; pass the data set itself, or images_per_class='all'"
            )
        return _data_set(loader.dataset)
    mapped = hasattr(loader, "__getitem__") and hasattr(loader, "__len__") and not isinstance(loader, list | tuple)
    if isinstance(loader, IterableDataset) or not mapped:
        raise UserError(f"a {type(loader).__name__} cannot skip samples, it gives one after another; {WITHOUT}")
    return loader
