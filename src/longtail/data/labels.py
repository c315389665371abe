"""Labels as they stand in files, numbers or names, to 0..K-1; a mistake is named with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from longtail.errors import UserError

Where = Callable[[int], str]


def from_numbers(
    numbers: np.ndarray, class_names: tuple[str, ...] | None, where: Where
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N,) that are 0..K-1 already; K is the largest + 1 unless names are given."""
    names = class_names or tuple(str(label) for label in range(int(numbers.max()) + 1))
    wrong = np.flatnonzero((numbers < 0) | (numbers >= len(names)))
    if len(wrong):
        last = len(names) - 1 if class_names else ""
        raise UserError(f"{where(int(wrong[0]))}: label {numbers[wrong[0]]} is outside 0..{last}")
    return torch.from_numpy(numbers.astype(np.int64)), names


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


def from_words(
    words: Sequence[str], class_names: tuple[str, ...] | None, where: Where
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N,) of text: numbers if all of them are (and the classes, if given, have no other names)."""
    by_number = class_names is None or class_names == tuple(str(label) for label in range(len(class_names)))
    if by_number and all(word.lstrip("-").isdecimal() for word in words):
        return from_numbers(np.array([int(word) for word in words]), class_names, where)
    return from_names(words, class_names, where)
