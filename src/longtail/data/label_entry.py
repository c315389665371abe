"""Which entry of a sample or a batch holds the labels: told by its name, its form, or the data set's list of labels.

Pairs are (inputs, labels). With more entries nothing is assumed: `(image, domain, label)` and `(image, label, index)`
look alike. If several entries could be the labels and the data set has no list that agrees with one of them, that is
an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from longtail.core.arrays import as_array
from longtail.data.labels import LABEL_NAMES
from longtail.errors import UserError

Key = int | str
SAMPLES, MOST_SAMPLES = 8, 200  # of a data set that are compared with its list of labels


def label_key(item: Any, dataset: Any = None, listed: np.ndarray | None = None) -> Key:
    """The place or name of the labels in a sample or batch.

    Args:
        item: a tuple or list (inputs, labels, …), or a dictionary.
        dataset: where it comes from, if its samples can be read by number.
        listed: (N,) the labels of all samples of the data set, from its own list.

    >>> label_key((torch.zeros(2, 5), torch.tensor([0, 1]), ["a.jpg", "b.jpg"]))
    1
    """
    keys = _keys(item)
    if len(keys) == 1:
        return keys[0]
    possible = [key for key in keys if _could_be(item[key])]
    if len(possible) <= 1:
        return possible[0] if possible else keys[0]  # its error says what it is instead
    if dataset is not None and listed is not None:
        possible = _agreeing(possible, item, dataset, listed) or possible
    first = as_array(item[possible[0]])
    if all(np.array_equal(first, as_array(item[key])) for key in possible):
        return possible[0]
    if isinstance(item, Mapping):
        raise UserError(
            f"the entries {', '.join(map(repr, possible))} of a batch or sample could all be the labels; keep one of "
            "them, or give the data set a list .targets of its labels"
        )
    raise UserError(
        f"a batch or sample has {len(item)} entries, and those at places {', '.join(map(str, possible))} (from 0 on) "
        "could all be the labels; make it (inputs, labels) or a dictionary with 'labels', or give the data set a list "
        ".targets of its labels"
    )


def _keys(item: Any) -> Sequence[Key]:
    """Where labels may be."""
    if isinstance(item, Mapping):
        names = [name for name in LABEL_NAMES if name in item]
        if not names:
            entries = ", ".join(map(str, item))
            raise UserError(
                f"a batch or sample has no labels: its entries are {entries}; expected one of {LABEL_NAMES}"
            )
        return names
    if isinstance(item, tuple | list) and len(item) >= 2:
        fields = getattr(item, "_fields", ())
        return [fields.index(name) for name in LABEL_NAMES if name in fields] or range(1, len(item))
    raise UserError(
        f"a batch or sample must be (inputs, labels) or a dictionary with labels, not {type(item).__name__}"
    )


def _could_be(entry: Any) -> bool:
    """Whether an entry could be labels, in a right or wrong form: whole numbers, or rows of shares that sum to 1."""
    if not isinstance(entry, torch.Tensor | np.ndarray | np.generic | list | tuple | int | float):
        return False
    try:
        array = as_array(entry)
    except ValueError:  # rows of different lengths
        return False
    if array.dtype.kind not in "iufb" or array.ndim > 2 or not array.size:
        return False
    if array.ndim < 2 or array.shape[1] == 1:
        return bool((array == np.round(array)).all())
    return bool((array >= 0).all()) and bool((np.abs(array.sum(1, dtype=np.float64) - 1) < 1e-3).all())


def _agreeing(keys: list[Key], item: Any, dataset: Any, listed: np.ndarray) -> list[Key]:
    """Those entries in which samples of the data set have the listed labels."""
    for number, place in enumerate(np.random.default_rng(0).permutation(len(listed))[:MOST_SAMPLES].tolist()):
        if number >= SAMPLES and len(keys) <= 1:
            break
        try:
            sample = dataset[place]
        except Exception:  # somebody else's code, which may work in its loader alone
            return []
        keys = [key for key in keys if len(sample) == len(item) and _number_at(sample, key) == listed[place]]
    return keys


def _number_at(sample: Any, key: Key) -> int | None:
    try:
        return int(sample[key])
    except (LookupError, TypeError, ValueError, RuntimeError):  # the sample has another form than the batch
        return None
