"""Which entry of a sample or batch holds the labels, and their conversion to class numbers.

The rule: in a dictionary or named tuple, the labels are under one of `LABEL_ENTRIES`; in another tuple or list they are
any entry but the first. If several entries remain, those that cannot be labels are dropped, then those that differ from
the data set's list of labels. If entries with different values remain, that is an error: `(image, domain, label)` and
`(image, label, index)` look alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from longtail.errors import UserError
from longtail.files.tensors import as_array

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
    candidates = _candidates(item)
    if len(candidates) == 1:
        return candidates[0]
    keys = [key for key in candidates if _could_be_labels(item[key], multilabel)]
    if len(keys) <= 1:
        return keys[0] if keys else candidates[0]  # the conversion's error says what it is instead
    if dataset is not None and listed is not None:
        keys = _agreeing(keys, item, dataset, listed) or keys
    first = as_array(item[keys[0]])
    if all(np.array_equal(first, as_array(item[key])) for key in keys):
        return keys[0]
    if isinstance(item, Mapping):
        raise UserError(
            f"the entries {', '.join(map(repr, keys))} of a batch or sample could all be the labels; keep one of "
            "them, or give the data set a list .targets of its labels"
        )
    raise UserError(
        f"a batch or sample has {len(item)} entries, and those at places {', '.join(map(str, keys))} (from 0 on) "
        "could all be the labels; make it (inputs, labels) or a dictionary with 'labels', or give the data set a list "
        ".targets of its labels"
    )


def _candidates(item: Any) -> Sequence[Key]:
    if isinstance(item, Mapping):
        names = [name for name in LABEL_ENTRIES if name in item]
        if not names:
            entries = ", ".join(map(str, item))
            raise UserError(
                f"a batch or sample has no labels: its entries are {entries}; expected one of {LABEL_ENTRIES}"
            )
        return names
    if isinstance(item, tuple | list) and len(item) >= 2:
        fields = getattr(item, "_fields", ())
        return [fields.index(name) for name in LABEL_ENTRIES if name in fields] or range(1, len(item))
    raise UserError(
        f"a batch or sample must be (inputs, labels) or a dictionary with labels, not {type(item).__name__}"
    )


def _could_be_labels(entry: Any, multilabel: bool = False) -> bool:
    """Whether an entry could be labels, in a right or wrong form: whole numbers, or rows of shares that sum to 1.

    Of a multi-label set, rows of 0 and 1.
    """
    if not isinstance(entry, torch.Tensor | np.ndarray | np.generic | list | tuple | int | float):
        return False
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
    for number, index in enumerate(np.random.default_rng(0).permutation(len(listed))[:MAX_COMPARED].tolist()):
        if number >= MIN_COMPARED and len(keys) <= 1:
            break
        try:
            sample = dataset[index]
        except Exception:  # somebody else's code, which may work in its loader alone
            return []
        keys = [key for key in keys if len(sample) == len(item) and _number_at(sample, key) == listed[index]]
    return keys


def _number_at(sample: Any, key: Key) -> int | None:
    try:
        return int(sample[key])
    except (LookupError, TypeError, ValueError, RuntimeError):  # the sample has another form than the batch
        return None


def as_class_numbers(labels: Any) -> np.ndarray:
    """Labels (N,) or (N, 1) of any integer type as int64 (N,); for other labels the error says what they are."""
    try:
        array = as_array(labels)
    except ValueError as error:  # numpy's about rows of different lengths
        raise UserError("samples have different numbers of labels; class numbers are needed, one per sample") from error
    if array.dtype.kind not in "iufb":
        example = next(iter(array.ravel().tolist()), None)
        kind = f"{type(example).__name__} ({str(example)[:40]!r})"
        raise UserError(f"labels are {kind}, not class numbers; number the classes from 0 on")
    if array.dtype.kind in "iu" and array.shape[1:] in ((), (1,)) and array.ndim:
        return array.reshape(-1).astype(np.int64)
    hint = ": several numbers per sample"
    if array.ndim == 1:
        hint = "; convert them to whole numbers"
    elif array.ndim == 2 and np.isin(array, (0, 1)).all():
        one_hot = (array.sum(1) == 1).all()
        hint = "; if every sample has exactly one 1, argmax(1) gives the class numbers"
        hint = hint if one_hot else ": samples with several classes, or none, have no class counts"
    raise UserError(f"labels must be class numbers, one per sample, not {array.dtype} of shape {array.shape}{hint}")
