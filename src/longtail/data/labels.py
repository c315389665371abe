"""Samples per class of any data set, loader or list of labels, and which entry of a sample or batch holds the labels.

The rule: in a dictionary or named tuple, the labels are under one of `LABEL_ENTRIES`; in another tuple or list they are
any entry but the first. If several entries remain, those that cannot be labels are dropped, then those that differ from
the data set's list of labels. If entries with different values remain, that is an error: `(image, domain, label)` and
`(image, label, index)` look alike. A list of labels is compared with three samples; without one all samples are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from longtail.data.images import Images
from longtail.data.splits import Splits
from longtail.errors import UserError, whole_number
from longtail.files.tensors import as_array, random_state_kept

Key = int | str
LABEL_ENTRIES = ("labels", "label", "fine_label", "targets", "target", "y", "label_ids")  # the most likely first
MIN_COMPARED, MAX_COMPARED = 8, 200  # samples of a data set that are compared with its list of labels


def label_key(item: Any, dataset: Any = None, listed: np.ndarray | None = None, *, multilabel: bool = False) -> Key:
    """The position or name of the labels in a sample or batch.

    Args:
        item: a tuple or list (inputs, labels, …), or a dictionary.
        dataset: the data set of the item, if its samples can be read by number.
        listed: (N,) the data set's list of labels.
        multilabel: whether the labels are (N, K) of 0 and 1.

    >>> label_key((torch.zeros(2, 5), torch.tensor([0, 1]), ["a.jpg", "b.jpg"]))
    1
    """
    candidates: Sequence[Key]
    if isinstance(item, Mapping):
        candidates = [name for name in LABEL_ENTRIES if name in item]
        if not candidates:
            raise UserError(
                f"a batch or sample has no labels: its entries are {', '.join(map(str, item))}; expected one of "
                f"{LABEL_ENTRIES}"
            )
    elif isinstance(item, tuple | list) and len(item) >= 2:
        fields = getattr(item, "_fields", ())
        candidates = [fields.index(name) for name in LABEL_ENTRIES if name in fields] or range(1, len(item))
    else:
        raise UserError(
            f"a batch or sample must be (inputs, labels) or a dictionary with labels, not {type(item).__name__}"
        )
    if len(candidates) == 1:
        return candidates[0]
    keys = [key for key in candidates if _could_be_labels(item[key], multilabel)]
    if len(keys) <= 1:
        return keys[0] if keys else candidates[0]  # the error of the conversion names its type
    if dataset is not None and listed is not None:
        keys = _agreeing(keys, item, dataset, listed) or keys
    first = as_array(item[keys[0]])
    if all(np.array_equal(first, as_array(item[key])) for key in keys):
        return keys[0]
    remedy = "keep one of them" if isinstance(item, Mapping) else "make it (inputs, labels)"
    raise UserError(
        f"of the {len(item)} entries of a batch or sample, {', '.join(map(repr, keys))} (numbered from 0) could all be "
        f"the labels; {remedy}, make it a dictionary with 'labels', or give the data set a list .targets of its labels"
    )


def _could_be_labels(entry: Any, multilabel: bool) -> bool:
    """Whether an entry could be labels, in a right or wrong form: whole numbers, or rows of shares that sum to 1.

    Of a multi-label set, rows of 0 and 1.
    """
    try:
        array = as_array(entry)
    except ValueError:  # rows of different lengths
        return False
    if array.dtype.kind not in "iufb" or array.ndim > 2 or not array.size:
        return False
    if multilabel:
        return array.ndim == 2 and bool(np.isin(array, (0, 1)).all())
    if array.ndim < 2 or array.shape[1] == 1:
        return bool((array == np.round(array)).all())
    return bool((array >= 0).all()) and bool((np.abs(array.sum(1, dtype=np.float64) - 1) < 1e-3).all())


def _agreeing(keys: list[Key], item: Any, dataset: Any, listed: np.ndarray) -> list[Key]:
    """Those entries in which samples of the data set have the listed labels."""

    def agrees(sample: Any, key: Key, label: int) -> bool:
        with suppress(LookupError, TypeError, ValueError, RuntimeError):  # the sample has another form than the batch
            return len(sample) == len(item) and int(sample[key]) == label
        return False

    for number, index in enumerate(np.random.default_rng(0).permutation(len(listed))[:MAX_COMPARED].tolist()):
        if number >= MIN_COMPARED and len(keys) <= 1:
            break
        try:
            sample = dataset[index]
        except Exception:  # code of the user, which may work in its loader alone
            return []
        keys = [key for key in keys if agrees(sample, key, listed[index])]
    return keys


def as_class_numbers(labels: Any) -> np.ndarray:
    """Labels (N,) or (N, 1) as int64 (N,): whole numbers, or the floats 0 and 1 of a binary cross-entropy."""
    try:
        array = as_array(labels)
    except ValueError as error:  # numpy's about rows of different lengths
        raise UserError("samples have different numbers of labels; class numbers are needed, one per sample") from error
    if array.dtype.kind not in "iufb":
        example = next(iter(array.ravel().tolist()), None)
        kind = f"{type(example).__name__} ({str(example)[:40]!r})"
        raise UserError(f"labels are {kind}, not class numbers; number the classes from 0 on")
    binary = array.dtype.kind == "f" and bool(np.isin(array, (0, 1)).all())
    if array.ndim and array.shape[1:] in ((), (1,)) and (array.dtype.kind in "iu" or binary):
        return array.reshape(-1).astype(np.int64)
    hint = "; convert them to whole numbers" if array.ndim == 1 else ": several numbers per sample"
    if array.ndim == 2 and np.isin(array, (0, 1)).all():
        hint = ": samples with several classes, or none, have no class counts (use posthoc.MultiLabelCalibration)"
        if (array.sum(1) == 1).all():
            hint = "; if every sample has exactly one 1, argmax(1) gives the class numbers"
    raise UserError(f"labels must be class numbers, one per sample, not {array.dtype} of shape {array.shape}{hint}")


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
    labels, agree = dataset_labels(dataset, unchanged=True), False
    with random_state_kept(), suppress(Exception):  # somebody else's code, or samples of another form
        agree = labels is not None and _samples_agree(labels, dataset)
    return labels if agree else None


def _label_lists(dataset: Any) -> Iterator[Any]:
    """The attributes and columns in which data sets keep their labels."""
    columns: Any = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    if _is_hugging_face(dataset):
        table = dataset.with_format("numpy")
        columns = {name: table[name][:] for name in LABEL_ENTRIES if name in dataset.column_names}
    with suppress(UserError):  # several could be the labels, or none
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
    return (listed, _num_class_names(source)) if _samples_agree(listed, source) else (_read_labels(source), None)


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
    """Whether the first, the middle and the last sample have the listed labels; a table's column is its samples'."""
    indices = (0, len(listed) // 2, len(listed) - 1) if len(listed) and not _is_hugging_face(dataset) else ()
    samples = ((index, dataset[index]) for index in indices)
    return all(_numbers(one, label_key(one, dataset, listed))[0] == listed[index] for index, one in samples)


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
    if isinstance(dataset, Subset | ConcatDataset):
        inner = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset.dataset]
        numbers = [number for number in map(_num_class_names, inner) if number]
        return max(numbers) if len(numbers) == len(inner) else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    if _is_hugging_face(dataset):
        features = [dataset.features[name] for name in LABEL_ENTRIES if name in dataset.column_names]
        return getattr(features[0], "num_classes", None) if features else None
    owners = (dataset, getattr(dataset, "reader", None))
    named = [getattr(owner, name, None) for owner in owners for name in ("classes", "class_to_idx")]
    return next((len(names) for names in named if isinstance(names, list | tuple | Mapping)), None)
