"""How many samples of each class a data set has, for data sets of any library.

If a data set has a list of labels, they are counted without reading its images. The list is first compared with
the labels of three samples, because training uses those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from longtail.core.arrays import as_array
from longtail.core.random_state import random_state_kept
from longtail.data.images import Images
from longtail.data.label_entry import label_key
from longtail.data.labels import LABEL_NAMES, as_class_numbers
from longtail.data.splits import Splits
from longtail.errors import UserError, whole_number


def class_counts(dataset: Any, *, num_classes: int | None = None) -> Tensor:
    """Samples per class, (K,) int64: the `class_counts` of the losses.

    Args:
        dataset: a data set of torch, torchvision, timm, Hugging Face or this library, also as a `Subset` or
            `ConcatDataset`; its loader (the data set is counted, not what the sampler draws); batches
            (inputs, labels); or the labels themselves. Without a list of labels, all samples are read.
        num_classes: K; needed if the data set does not know it and the last classes may have no sample.

    >>> class_counts([0, 0, 2, 0, 1])
    tensor([3, 1, 1])
    """
    if num_classes is not None:
        whole_number("num_classes", num_classes)
    labels, known = _labels_and_classes(_without_loader(dataset))
    if len(labels) == 0:
        raise UserError("there are no samples to count")
    if labels.min() < 0:
        place = int(labels.argmin())
        raise UserError(
            f"sample {place} has the label {labels[place]}, but classes are numbered from 0 on; leave out samples "
            "without a class, for example with torch.utils.data.Subset"
        )
    found, wanted = int(labels.max()) + 1, num_classes or known
    if wanted is not None and wanted < found:
        whose = "num_classes is" if num_classes else "the number of class names of the data set is"
        raise UserError(f"{whose} {wanted}, but there are labels up to {found - 1}; pass a larger num_classes=")
    return torch.from_numpy(np.bincount(labels, minlength=wanted or found))


def dataset_labels(dataset: Any, *, unchanged: bool = False) -> np.ndarray | None:
    """(N,) class numbers from the data set's list of labels, without reading samples; None if it has no list.

    With `unchanged`, None also for a data set that changes its labels afterwards (`target_transform`).
    """
    if isinstance(dataset, Subset):
        inner = dataset_labels(dataset.dataset, unchanged=unchanged)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        found = [dataset_labels(part, unchanged=unchanged) for part in dataset.datasets]
        parts = [part for part in found if part is not None]
        return np.concatenate(parts) if len(parts) == len(found) else None
    change = getattr(dataset, "target_transform", None)
    if unchanged and change is not None:
        return None
    for values in _label_columns(dataset):
        try:
            labels = as_class_numbers(
                values if change is None else [change(value) for value in as_array(values).tolist()]
            )
        except UserError:  # the samples may have a different kind of label
            continue
        if len(labels) == len(dataset):
            return labels
    return None


def training_labels(dataset: Any) -> np.ndarray | None:
    """(N,) class numbers from the data set's list of labels, if its samples have these labels; None otherwise."""
    labels = dataset_labels(dataset, unchanged=True)
    if labels is None or _is_hugging_face(dataset):
        return labels
    with random_state_kept(), suppress(Exception):  # somebody else's code, or samples of another form: not known then
        return labels if _agree(labels, dataset) else None
    return None


def _label_columns(dataset: Any) -> Iterator[Any]:
    """The places in which data sets keep their labels."""
    columns: Any = ()
    if isinstance(dataset, TensorDataset):
        columns = dataset.tensors if len(dataset.tensors) > 1 else ()
    elif _is_hugging_face(dataset):
        table = dataset.with_format("numpy")
        columns = {name: table[name][:] for name in LABEL_NAMES if name in dataset.column_names}
    if columns:
        with suppress(UserError):  # several could be the labels
            yield columns[label_key(columns)]
    yield from (getattr(dataset, name) for name in ("targets", "labels", "_labels", "y") if hasattr(dataset, name))
    for owner in (dataset, getattr(dataset, "reader", None)):  # a folder of torchvision, a data set of timm
        for name in ("samples", "_samples"):
            pairs = getattr(owner, name, None)
            if isinstance(pairs, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                yield [label for _, label in pairs]


def _without_loader(dataset: Any) -> Any:
    """The data set of a loader, unless it can only be iterated; the training images of `Splits`."""
    if isinstance(dataset, Splits):
        return dataset.train
    inner = getattr(dataset, "dataset", None)
    if inner is None or isinstance(dataset, Dataset) or _has_places(dataset):
        return dataset  # a data set made of another may change its labels
    found = _without_loader(inner)
    return found if _has_places(found) else dataset


def _labels_and_classes(source: Any) -> tuple[np.ndarray, int | None]:
    """Labels (N,) and, where the source knows it, the number of classes."""
    if isinstance(source, Images):
        return source.labels.cpu().numpy(), source.num_classes
    if isinstance(source, Mapping):
        raise UserError(f"a dictionary of {', '.join(map(str, source))} is not a data set; pass one of its entries")
    with random_state_kept():
        if _are_labels(source):
            return as_class_numbers(source if isinstance(source, Tensor | np.ndarray) else list(source)), None
        if not _has_places(source):
            return _read(source), None
        ready = dataset_labels(source)
        if ready is not None and (_is_hugging_face(source) or _agree(ready, source)):
            return ready, _known_classes(source)
        return _read(source), _known_classes(source) if ready is None else None


def _are_labels(source: Any) -> bool:
    """Whether these are labels, not samples: an array, a column of a table, a list of numbers or words."""
    if isinstance(source, Tensor | np.ndarray):
        return True
    if isinstance(source, Dataset) or not _has_places(source):
        return False
    return any(isinstance(one, Number | str) or getattr(one, "shape", None) == () for one in islice(source, 1))


def _has_places(source: Any) -> bool:
    """Whether samples can be read by index, `source[place]`."""
    return isinstance(source, Sized) and hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)


def _is_hugging_face(dataset: Any) -> bool:
    """Whether this is a table of the library `datasets`."""
    return hasattr(dataset, "with_format") and hasattr(dataset, "column_names")


def _agree(labels: np.ndarray, dataset: Any) -> bool:
    """Whether the first, the middle and the last sample have these labels."""
    places = (0, len(labels) // 2, len(labels) - 1) if len(labels) else ()
    return all(_label_of(dataset, place, labels) == labels[place] for place in places)


def _label_of(dataset: Any, place: int, listed: np.ndarray) -> int:
    sample = dataset[place]
    return int(_numbers(sample, label_key(sample, dataset, listed))[0])


def _read(source: Any) -> np.ndarray:
    """Labels (N,) of the samples of a data set, or of the batches of a loader."""
    either = isinstance(source, list | tuple | DataLoader)  # a loader without a batch size gives samples
    if _has_places(source) and not either:
        samples = (source[place] for place in range(len(source)))
        numbers = [_numbers(sample, label_key(sample)) for sample in samples]
    elif isinstance(source, Iterable):
        alone = isinstance(source, IterableDataset) or _is_hugging_face(source)
        numbers = [_numbers(item, label_key(item), single=alone or either, batch=not alone) for item in source]
    else:
        raise UserError(f"a {type(source).__name__} has no samples to count; pass a data set, a loader or labels")
    return np.concatenate([np.zeros(0, np.int64), *numbers])


def _numbers(item: Any, key: Any, *, single: bool = True, batch: bool = False) -> np.ndarray:
    """Class numbers (n,) of a single sample, n = 1, or of a batch, whose labels are at `key`."""
    array = as_array(item[key])
    inputs = [item[name] for name in item if name != key] if isinstance(item, Mapping) else [item[0]]
    sizes = {len(one) for one in inputs if isinstance(one, Tensor | np.ndarray) and one.ndim}
    if batch and array.ndim and sizes <= {len(array)}:
        return as_class_numbers(array)
    if not single:
        raise UserError(f"a batch must be (inputs, labels) with one label per sample, not {array.shape} labels")
    return as_class_numbers(array.reshape(1, -1))


def _known_classes(dataset: Any) -> int | None:
    """The number of class names of a data set; None if it changes the labels afterwards."""
    if isinstance(dataset, Subset):
        return _known_classes(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = [part for part in map(_known_classes, dataset.datasets) if part]
        return max(parts) if len(parts) == len(dataset.datasets) else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    if _is_hugging_face(dataset):
        names = [name for name in LABEL_NAMES if name in dataset.column_names]
        return getattr(dataset.features[names[0]], "num_classes", None) if names else None
    owners = (dataset, getattr(dataset, "reader", None))
    named = [getattr(owner, name, None) for owner in owners for name in ("classes", "class_to_idx")]
    return next((len(names) for names in named if isinstance(names, list | tuple | Mapping)), None)
