"""Samples per class of any data set, loader or list of labels.

If the data set has a list of labels, the list is used, after it was compared with three samples; otherwise all samples
are read.
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

from longtail.data.images import Images
from longtail.data.labels import LABEL_ENTRIES, as_class_numbers, label_key
from longtail.data.splits import Splits
from longtail.errors import UserError, whole_number
from longtail.files.tensors import as_array, random_state_kept


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
    with random_state_kept():
        labels, named_classes = _labels_and_classes(_dataset_of(dataset))
    if len(labels) == 0:
        raise UserError("there are no samples to count")
    if labels.min() < 0:
        index = int(labels.argmin())
        raise UserError(
            f"sample {index} has the label {labels[index]}, but classes are numbered from 0 on; leave out samples "
            "without a class, for example with torch.utils.data.Subset"
        )
    largest, wanted = int(labels.max()), num_classes or named_classes
    if wanted is not None and wanted <= largest:
        whose = "num_classes is" if num_classes else "the number of class names of the data set is"
        raise UserError(f"{whose} {wanted}, but there are labels up to {largest}; pass a larger num_classes=")
    return torch.from_numpy(np.bincount(labels, minlength=wanted or 0))


def dataset_labels(dataset: Any, *, unchanged: bool = False) -> np.ndarray | None:
    """(N,) class numbers from the data set's list of labels, without reading samples; None if it has no list.

    With `unchanged`, None also for a data set that changes its labels afterwards (`target_transform`).
    """
    if isinstance(dataset, Subset):
        inner = dataset_labels(dataset.dataset, unchanged=unchanged)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        lists = [dataset_labels(inner, unchanged=unchanged) for inner in dataset.datasets]
        present = [labels for labels in lists if labels is not None]
        return np.concatenate(present) if len(present) == len(lists) else None
    change = getattr(dataset, "target_transform", None)
    if unchanged and change is not None:
        return None
    for values in _label_lists(dataset):
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
    with random_state_kept(), suppress(Exception):  # somebody else's code, or samples of another form
        return labels if _samples_agree(labels, dataset) else None
    return None


def _label_lists(dataset: Any) -> Iterator[Any]:
    """The attributes and columns in which data sets keep their labels."""
    columns: Any = ()
    if isinstance(dataset, TensorDataset):
        columns = dataset.tensors if len(dataset.tensors) > 1 else ()
    elif _is_hugging_face(dataset):
        table = dataset.with_format("numpy")
        columns = {name: table[name][:] for name in LABEL_ENTRIES if name in dataset.column_names}
    if columns:
        with suppress(UserError):  # several could be the labels
            yield columns[label_key(columns)]
    yield from (getattr(dataset, name) for name in ("targets", "labels", "_labels", "y") if hasattr(dataset, name))
    for owner in (dataset, getattr(dataset, "reader", None)):  # a folder of torchvision, a data set of timm
        for name in ("samples", "_samples"):
            pairs = getattr(owner, name, None)
            if isinstance(pairs, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                yield [label for _, label in pairs]


def _dataset_of(source: Any) -> Any:
    """The data set of a loader, unless it can only be iterated; the training images of `Splits`."""
    if isinstance(source, Splits):
        return source.train
    inner = getattr(source, "dataset", None)
    if inner is None or isinstance(source, Dataset) or _is_indexable(source):
        return source  # a data set made of another may change its labels
    dataset = _dataset_of(inner)
    return dataset if _is_indexable(dataset) else source


def _labels_and_classes(source: Any) -> tuple[np.ndarray, int | None]:
    """Labels (N,) and, where the source has class names, their number."""
    if isinstance(source, Images):
        return source.labels.cpu().numpy(), source.num_classes
    if isinstance(source, Mapping):
        raise UserError(f"a dictionary of {', '.join(map(str, source))} is not a data set; pass one of its entries")
    if _are_labels(source):
        return as_class_numbers(source if isinstance(source, Tensor | np.ndarray) else list(source)), None
    if not _is_indexable(source):
        return _read_labels(source), None
    listed = dataset_labels(source)
    if listed is None:
        return _read_labels(source), _num_class_names(source)
    if _is_hugging_face(source) or _samples_agree(listed, source):
        return listed, _num_class_names(source)
    return _read_labels(source), None


def _are_labels(source: Any) -> bool:
    """Whether these are labels, not samples: an array, a column of a table, a list of numbers or words."""
    if isinstance(source, Tensor | np.ndarray):
        return True
    if isinstance(source, Dataset) or not _is_indexable(source):
        return False
    return any(isinstance(one, Number | str) or getattr(one, "shape", None) == () for one in islice(source, 1))


def _is_indexable(source: Any) -> bool:
    """Whether samples can be read by number, `source[index]`."""
    return isinstance(source, Sized) and hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)


def _is_hugging_face(dataset: Any) -> bool:
    """Whether this is a table of the library `datasets`."""
    return hasattr(dataset, "with_format") and hasattr(dataset, "column_names")


def _samples_agree(listed: np.ndarray, dataset: Any) -> bool:
    """Whether the first, the middle and the last sample have the listed labels."""
    for index in (0, len(listed) // 2, len(listed) - 1) if len(listed) else ():
        sample = dataset[index]
        if _numbers(sample, label_key(sample, dataset, listed))[0] != listed[index]:
            return False
    return True


def _read_labels(source: Any) -> np.ndarray:
    """Labels (N,) of the samples of a data set, or of the batches of a loader."""
    either = isinstance(source, list | tuple | DataLoader)  # a loader without a batch size gives samples
    if _is_indexable(source) and not either:
        samples = (source[index] for index in range(len(source)))
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


def _num_class_names(dataset: Any) -> int | None:
    """The number of class names of a data set; None if it changes the labels afterwards."""
    if isinstance(dataset, Subset):
        return _num_class_names(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        numbers = [number for number in map(_num_class_names, dataset.datasets) if number]
        return max(numbers) if len(numbers) == len(dataset.datasets) else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    if _is_hugging_face(dataset):
        names = [name for name in LABEL_ENTRIES if name in dataset.column_names]
        return getattr(dataset.features[names[0]], "num_classes", None) if names else None
    owners = (dataset, getattr(dataset, "reader", None))
    named = [getattr(owner, name, None) for owner in owners for name in ("classes", "class_to_idx")]
    return next((len(names) for names in named if isinstance(names, list | tuple | Mapping)), None)
