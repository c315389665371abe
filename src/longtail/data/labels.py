"""Converts labels from files or data sets to 0..K-1; errors name the mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.core.arrays import as_array
from longtail.errors import UserError

# Names of the label column or entry, the most likely first.
LABEL_NAMES = ("labels", "label", "fine_label", "targets", "target", "y", "label_ids")

Where = Callable[[int], str]
MOST_DIGITS = 18  # of a label, so that it fits into 64 bits
MOST_EMPTY, FEW_CLASSES = 10, 1000  # a list may have this many classes per image, and this many more


def from_numbers(
    numbers: np.ndarray, class_names: tuple[str, ...] | None, where: Where
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N,) that are 0..K-1 already; K is the largest + 1 unless names are given."""
    if class_names is None:
        _require_plausible(numbers, where)
    names = class_names or tuple(str(label) for label in range(int(numbers.max()) + 1))
    wrong = np.flatnonzero((numbers < 0) | (numbers >= len(names)))
    if len(wrong):
        last = len(names) - 1 if class_names else ""
        raise UserError(f"{where(int(wrong[0]))}: label {numbers[wrong[0]]} is outside 0..{last}")
    return torch.from_numpy(numbers.astype(np.int64)), names


def _require_plausible(numbers: np.ndarray, where: Where) -> None:
    """Refuse labels that are not classes, such as image ids: they would make millions of empty classes."""
    place, most = int(numbers.argmax()), MOST_EMPTY * len(numbers) + FEW_CLASSES
    if numbers[place] >= most:
        raise UserError(
            f"{where(place)}: label {numbers[place]} would make {int(numbers[place]) + 1:,} classes of "
            f"{len(numbers):,} images; labels are numbered from 0 to K - 1 without large gaps"
        )


def from_names(
    words: Sequence[str], class_names: tuple[str, ...] | None, where: Where
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N,) of names, numbered in alphabetical order unless the classes are given."""
    names = class_names or tuple(sorted(set(words)))
    numbers = {name: label for label, name in enumerate(names)}
    for place, word in enumerate(words):
        if word not in numbers:
            raise UserError(f"{where(place)}: the training set has no class {word!r}")
    return torch.tensor([numbers[word] for word in words]), names


def is_whole_number(word: str) -> bool:
    return word.removeprefix("-").isdecimal()


def whole_numbers(words: Sequence[str], where: Where) -> np.ndarray:
    """Decimal text to (N,) int64."""
    for place, word in enumerate(words):
        if len(word) > MOST_DIGITS:
            raise UserError(f"{where(place)}: label {word[:MOST_DIGITS]}… is too large")
    return np.array([int(word) for word in words], np.int64)


def from_words(
    words: Sequence[str], class_names: tuple[str, ...] | None, where: Where
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N,) from text: as numbers if all are numbers (and given class names are numbers too), else as names."""
    by_number = class_names is None or class_names == tuple(str(label) for label in range(len(class_names)))
    if by_number and all(map(is_whole_number, words)):
        return from_numbers(whole_numbers(words, where), class_names, where)
    return from_names(words, class_names, where)


def as_class_numbers(labels: Any) -> np.ndarray:
    """Labels (N,) or (N, 1) of any integer type as int64 (N,); for other labels the error says what they are."""
    try:
        array = as_array(labels)
    except ValueError as error:  # numpy's about rows of different lengths
        raise UserError("samples have different numbers of labels; class numbers are needed, one per sample") from error
    if array.dtype.kind not in "iufb":
        example = next(iter(array.ravel().tolist()), None)
        shown = f"{type(example).__name__} ({str(example)[:40]!r})"
        raise UserError(f"labels are {shown}, not class numbers; number the classes from 0 on")
    if array.dtype.kind in "iu" and array.shape[1:] in ((), (1,)) and array.ndim:
        return array.reshape(-1).astype(np.int64)
    raise UserError(
        f"labels must be class numbers, one per sample, not {array.dtype} of shape {array.shape}{_hint(array)}"
    )


def _hint(array: np.ndarray) -> str:
    """What kind of labels these are, and what to do."""
    if array.ndim == 1:
        return "; convert them to whole numbers"
    if array.ndim == 2 and np.isin(array, (0, 1)).all():
        if (array.sum(1) == 1).all():
            return "; if every sample has exactly one 1, argmax(1) gives the class numbers"
        return ": samples with several classes, or none, have no class counts"
    return ": several numbers per sample"
