"""At most so many samples of every class of any data set: only these are read, decoded and run."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset

from longtail.backbones.inference import BATCH
from longtail.data.counts import dataset_labels
from longtail.data.loading import quiet_about_workers
from longtail.errors import UserError
from longtail.outputs.loaders import shows_all

WITHOUT = "pass a data set with its labels in .targets, or a DataLoader of one, or images_per_class='all'"
INSTEAD = "pass the data set itself, or images_per_class='all'"


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
    """The data set behind a loader, if samples can be taken from it by their number."""
    if isinstance(loader, DataLoader):
        if not isinstance(loader.dataset, IterableDataset):
            _require_plain(loader)
        return _data_set(loader.dataset)
    mapped = hasattr(loader, "__getitem__") and hasattr(loader, "__len__") and not isinstance(loader, list | tuple)
    if isinstance(loader, IterableDataset) or not mapped:
        raise UserError(f"a {type(loader).__name__} cannot skip samples, it gives one after another; {WITHOUT}")
    return loader


def _require_plain(loader: DataLoader[Any]) -> None:
    """Refuse a loader that shows something else than batches of all samples of its data set."""
    if loader.batch_sampler is None:
        raise UserError(f"the loader has no batch size, so images per class cannot be chosen of its samples; {INSTEAD}")
    if not shows_all(loader):
        inner = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
        raise UserError(
            f"the loader draws its samples with a {type(inner).__name__}, which does not show every sample once, and a "
            f"choice of images per class would undo that; {INSTEAD}"
        )
