"""Which columns of a table hold the paths, the labels and the splits of images: by usual names, or by names given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtail.config import DataConfig
from longtail.data.file_names import SPLITS, split_of
from longtail.data.images import DecodedImages
from longtail.data.splits import ReadSplits
from longtail.errors import UserError, choose

PATH_NAMES = ("path", "image", "file", "filename", "file_name", "image_path", "filepath", "img")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "target", "category", "class_name", "y")
SPLIT_NAME = "split"


@dataclass(frozen=True)
class Told:
    """Names of the columns as the user gives them; None: by the usual names."""

    path: str | None = None
    label: str | None = None

    @classmethod
    def of(cls, config: DataConfig) -> Told:
        return cls(config.path_column, config.label_column)

    def __bool__(self) -> bool:
        return bool(self.path or self.label)


@dataclass(frozen=True)
class Columns:
    """The columns of paths (or images) and labels, and their names."""

    path: int
    label: int
    names: tuple[str, str] | None = None

    def place(self, file: str, *more: str) -> str:
        """A file and the columns that are read, for the line about what was found."""
        if not self.names:
            return file
        *first, last = map(repr, (*self.names, *more))
        return f"{file}, columns {', '.join(first)} and {last}"


def named_columns(
    header: Sequence[str], told: Told, file: Path, path_names: Sequence[str] = PATH_NAMES
) -> tuple[int, int]:
    """Columns of paths and labels in a header; of two columns, one known is enough."""
    path = _named(header, told.path, path_names, file)
    label = _named(header, told.label, LABEL_NAMES, file)
    if len(header) == 2 and (path is None) != (label is None):
        known = path if label is None else label
        assert known is not None
        path, label = (known, 1 - known) if label is None else (1 - known, known)
    if path is None and label is None:
        raise which_columns(file, header)
    if path is None:
        raise UserError(f"{file} has no column {path_names[0]!r}; {_say('--path-column', header)}")
    if label is None:
        raise UserError(f"{file} has no column 'label'; {_say('--label-column', header)}")
    if path == label:
        raise UserError(f"{file}: paths and labels cannot both be in the column {header[path]!r}")
    return path, label


def which_columns(file: Path, first: Sequence[str]) -> UserError:
    """The error about a table whose columns have unusual names, or that has no header; `first` is its first row."""
    return UserError(
        f"{file}: which of its {len(first)} columns hold paths and labels? Its first row: {', '.join(first)[:200]}; "
        "name them with --path-column NAME --label-column NAME, or call them path and label in a header"
    )


def _say(option: str, header: Sequence[str]) -> str:
    return f"say which it is with {option} NAME (columns: {', '.join(header)[:200]})"


def _named(header: Sequence[str], told: str | None, usual: Sequence[str], file: Path) -> int | None:
    """The column of that name, or the first of the usual names; capital letters do not matter."""
    known = [name.lower() for name in header]
    if told is None:
        return next((known.index(name) for name in usual if name in known), None)
    if told.lower() not in known:
        choose(f"column of {file}", told, header)
    return header.index(told) if told in header else known.index(told.lower())


def split_words(words: Sequence[str], where: Callable[[int], str]) -> np.ndarray:
    """The split that each word of a column means, (N,)."""
    meant = {word: split_of(word) for word in set(words)}
    for place, word in enumerate(words):
        if meant[word] is None:
            raise UserError(f"{where(place)}: the split {word!r} is none of train, validation, test")
    return np.array([meant[word] for word in words])


def by_column(
    images: DecodedImages, split: np.ndarray, file: str, columns: Columns, others: Sequence[Path]
) -> ReadSplits:
    """The splits that a column of one table names; `others` are files that hold splits, too."""
    if others:
        raise UserError(
            f"{file} has a column {SPLIT_NAME!r}, and {others[0].name} holds another split; "
            "use one of them (rename or move the other)"
        )
    parts = {name: images.subset(np.flatnonzero(split == name)) for name in SPLITS if (split == name).any()}
    if "train" not in parts:
        raise UserError(f"{file} has no row whose split is train")
    places = dict.fromkeys(parts, f"column {SPLIT_NAME!r}") | {"train": columns.place(file, SPLIT_NAME)}
    return ReadSplits(parts["train"], parts.get("validation"), parts.get("test"), places)
