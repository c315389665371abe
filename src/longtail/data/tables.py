"""What the names of files, splits, columns and classes mean: how lists of images and their labels are recognised."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from longtail.config import DataConfig
from longtail.errors import UserError, choose

if TYPE_CHECKING:  # help texts read the names here, without torch
    from longtail.data.images import DecodedImages, Images

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
DELIMITERS_TRIED = (",", ";", "\t")  # spreadsheets of many countries write semicolons
LINES_TRIED = 20
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
SPLITS = tuple(SPLIT_NAMES)
PATH_COLUMNS = ("path", "image", "file", "filename", "file_name", "image_path", "filepath", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "category", "class_name", "y")
SPLIT_COLUMN = "split"
MAX_LABEL_DIGITS = 18  # so that a label fits into 64 bits
MAX_CLASSES_PER_IMAGE, FREE_CLASSES = 10, 1000  # a list may have this many classes per image, and this many more
# Words that say nothing about a split: Test-Images, train_set, images_val, Validation data.
FILLER = r"(?:data ?sets?|sets?|images?|imgs?|data|split|samples|photos|pictures)"
SPLIT_WORD = re.compile(rf"(?:{FILLER}[\s_.-]+)*([a-z]+?)(?:[\s_.-]*{FILLER})*")
ClassNames = tuple[str, ...]
Labels = tuple[np.ndarray, ClassNames]  # labels (N,) int64, and the class names
Where = Callable[[int], str]
"""From the number of a row to its name in error messages."""


@dataclass(frozen=True)
class ReadSplits:
    """The splits that a source has on disk."""

    train: Images
    validation: Images | None = None
    test: Images | None = None
    names_on_disk: dict[str, str] = field(default_factory=dict)  # split → its file, folder or column
    unused: tuple[str, ...] = ()  # files and folders next to the splits that are not read


class Table(NamedTuple):
    """The images that a file or folder lists, the names of its columns, and the split of each row, if it has them."""

    images: DecodedImages
    columns: tuple[str, ...] = ()
    splits: np.ndarray | None = None


F = TypeVar("F")


def read_splits(
    files: dict[str, F],
    read: Callable[[F, ClassNames | None], Table],
    name: Callable[[F], str],
    unused: Iterable[str] = (),
) -> ReadSplits:
    """Read a training set, and the other splits with its classes; or one table whose column `split` names the splits.

    `read` takes the file, folder or files of a split, and the class names, which are None for the training set; `name`
    gives its name, for people.
    """
    train, train_name = read(files["train"], None), name(files["train"])
    others = {split: file for split, file in files.items() if split != "train"}
    if train.splits is not None and (train.splits != "train").any():
        if others:
            raise UserError(
                f"{train_name} has a column {SPLIT_COLUMN!r}, and {name(next(iter(others.values())))} holds another "
                "split; use one of them (rename or move the other)"
            )
        rows = {split: np.flatnonzero(train.splits == split) for split in SPLITS}
        images: dict[str, Images] = {split: train.images.subset(rows[split]) for split in SPLITS if len(rows[split])}
        if "train" not in images:
            raise UserError(f"{train_name} has no row whose split is train")
        names, columns = dict.fromkeys(images, f"column {SPLIT_COLUMN!r}"), (*train.columns, SPLIT_COLUMN)
    else:
        images = {split: read(file, train.images.class_names).images for split, file in others.items()}
        images["train"] = train.images
        names, columns = {split: name(file) for split, file in others.items()}, train.columns
    *first, last = map(repr, columns or ("",))
    names["train"] = f"{train_name}, columns {', '.join(first)} and {last}" if columns else train_name
    return ReadSplits(images["train"], images.get("validation"), images.get("test"), names, tuple(unused))


def is_image(path: Path) -> bool:
    """Whether a file has the suffix of an image and is not hidden."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def is_csv(path: Path) -> bool:
    return path.suffix.lower() in DELIMITERS


def split_of(name: str) -> str | None:
    """The split that a name means, in lower or upper case, also with a word such as "set" or "images".

    >>> split_of("Training"), split_of("val"), split_of("Test-Images"), split_of("cats")
    ('train', 'validation', 'test', None)
    """
    word = SPLIT_WORD.fullmatch(name.strip().lower())
    return next((split for split, names in SPLIT_NAMES.items() if word and word[1] in names), None)


def by_split(named: Iterable[tuple[str, Path]], where: Path) -> dict[str, Path]:
    """Split → path; two paths of one split are an error, because one of them would be ignored silently."""
    paths: dict[str, Path] = {}
    for split, path in named:
        if split in paths:
            raise UserError(f"{where} has two {split} splits, {paths[split].name} and {path.name}; rename one of them")
        paths[split] = path
    return paths


def held_out_beside(path: Path) -> dict[str, Path]:
    """The held-out files beside a file of training images: `x_train.txt` has `x_val.txt` and `x_test.txt`."""
    word = re.compile(r"(?<![a-z])(training|train)(?![a-z])", re.IGNORECASE)
    if not word.search(path.stem):
        return {}
    before, after = word.split(path.stem, maxsplit=1)[::2]
    sibling = re.compile(re.escape(before) + r"([a-z]+)" + re.escape(after), re.IGNORECASE)
    others = sorted(path.parent.glob(f"*{path.suffix}"))
    splits = [(split_of(match[1]), other) for other in others if (match := sibling.fullmatch(other.stem))]
    return by_split(((split, other) for split, other in splits if split and split != "train"), path.parent)


def csv_reader(lines: list[str], path: Path) -> Any:
    """The rows of a CSV file, divided by the first delimiter that gives equally many cells, two or more, in each line.

    Only the first lines are tried; if no delimiter does, it is the one that the suffix of the path means.
    """
    first, usual = [line for line in lines if line.strip()][:LINES_TRIED], DELIMITERS.get(path.suffix.lower(), ",")
    for delimiter in (usual, *DELIMITERS_TRIED):
        sizes = {len(row) for row in csv.reader(first, delimiter=delimiter)}
        if len(sizes) == 1 and min(sizes) > 1:
            return csv.reader(lines, delimiter=delimiter)
    return csv.reader(lines, delimiter=usual)


def named_columns(
    header: Sequence[str], config: DataConfig, file: Path, path_columns: Sequence[str] = PATH_COLUMNS
) -> tuple[int, int]:
    """Positions of the columns of paths and labels in a header.

    They have the names in the configuration, or usual names; if one of two columns is recognised, the other is the
    other one.
    """
    path = _column(header, config.path_column, path_columns, file)
    label = _column(header, config.label_column, LABEL_COLUMNS, file)
    if path is None and label is None:
        raise unclear_columns(file, header)
    if len(header) == 2:
        path = 1 - label if path is None and label is not None else path
        label = 1 - path if label is None and path is not None else label
    if path is None or label is None:
        name, option = (path_columns[0], "path") if path is None else ("label", "label")
        columns = f"--{option}-column NAME (columns: {', '.join(header)[:200]})"
        raise UserError(f"{file} has no column {name!r}; say which it is with {columns}")
    if path == label:
        raise UserError(f"{file}: paths and labels cannot both be in the column {header[path]!r}")
    return path, label


def _column(header: Sequence[str], given: str | None, usual: Sequence[str], file: Path) -> int | None:
    """The column of the given name, or the first with a usual name; capital letters do not matter."""
    names = [name.lower() for name in header]
    if given is None:
        return next((names.index(name) for name in usual if name in names), None)
    if given.lower() not in names:
        choose(f"column of {file}", given, header)
    return header.index(given) if given in header else names.index(given.lower())


def unclear_columns(file: Path, first_row: Sequence[str]) -> UserError:
    """The error about a table whose columns have unusual names, or that has no header."""
    return UserError(
        f"{file}: which of its {len(first_row)} columns hold paths and labels? Its first row: "
        f"{', '.join(first_row)[:200]}; name them with --path-column NAME --label-column NAME, or call them path and "
        "label in a header"
    )


def splits_of(words: Sequence[str], where: Where) -> np.ndarray:
    """The split that each word of a column means, (N,)."""
    splits = {word: split_of(word) for word in set(words)}
    for row, word in enumerate(words):
        if splits[word] is None:
            raise UserError(f"{where(row)}: the split {word!r} is none of train, validation, test")
    return np.array([splits[word] for word in words])


def labels_of_numbers(numbers: np.ndarray, class_names: ClassNames | None, where: Where) -> Labels:
    """Labels (N,) int64 that are 0..K-1 already, and the class names; K is the largest + 1 unless names are given."""
    largest = int(numbers.argmax())
    if class_names is None and numbers[largest] >= MAX_CLASSES_PER_IMAGE * len(numbers) + FREE_CLASSES:
        raise UserError(
            f"{where(largest)}: label {numbers[largest]} would make {int(numbers[largest]) + 1:,} classes of "
            f"{len(numbers):,} images; labels are numbered from 0 to K - 1 without large gaps"
        )
    names = class_names or tuple(str(label) for label in range(int(numbers[largest]) + 1))
    wrong = np.flatnonzero((numbers < 0) | (numbers >= len(names)))
    if len(wrong):
        last = len(names) - 1 if class_names else ""
        raise UserError(f"{where(int(wrong[0]))}: label {numbers[wrong[0]]} is outside 0..{last}")
    return numbers.astype(np.int64), names


def labels_of_names(words: Sequence[str], class_names: ClassNames | None, where: Where) -> Labels:
    """Labels (N,) int64 and class names, which are in alphabetical order unless they are given."""
    names = class_names or tuple(sorted(set(words)))
    numbers = {name: label for label, name in enumerate(names)}
    for row, word in enumerate(words):
        if word not in numbers:
            raise UserError(f"{where(row)}: the training set has no class {word!r}")
    return np.array([numbers[word] for word in words], np.int64), names


def is_whole_number(word: str) -> bool:
    return word.removeprefix("-").isdecimal()


def labels_of_words(words: Sequence[str], class_names: ClassNames | None, where: Where) -> Labels:
    """Labels of text: as numbers if all are numbers (and given class names are numbers too), else as names."""
    by_number = class_names is None or class_names == tuple(str(label) for label in range(len(class_names)))
    if not by_number or not all(map(is_whole_number, words)):
        return labels_of_names(words, class_names, where)
    for row, word in enumerate(words):
        if len(word) > MAX_LABEL_DIGITS:
            raise UserError(f"{where(row)}: label {word[:MAX_LABEL_DIGITS]}… is too large")
    return labels_of_numbers(np.array([int(word) for word in words], np.int64), class_names, where)
