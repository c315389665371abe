"""File names of images, of tables of images, and of the splits of a data set."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from longtail.errors import UserError

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
# Words that say nothing about a split: Test-Images, train_set, images_val, Validation data.
FILLER = r"(?:data ?sets?|sets?|images?|imgs?|data|split|samples|photos|pictures)"
SPLIT_WORD = re.compile(rf"(?:{FILLER}[\s_.-]+)*([a-z]+?)(?:[\s_.-]*{FILLER})*")


def is_image(path: Path) -> bool:
    """Whether a file has the suffix of an image and is not hidden."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def is_table(path: Path) -> bool:
    """Whether a file has the suffix of a table of images."""
    return path.suffix.lower() in DELIMITERS


def split_of(name: str) -> str | None:
    """The split that a name means, in lower or upper case, also with a word such as "set" or "images".

    >>> split_of("Training"), split_of("val"), split_of("Test-Images"), split_of("cats")
    ('train', 'validation', 'test', None)
    """
    word = SPLIT_WORD.fullmatch(name.strip().lower())
    return next((split for split, names in SPLIT_NAMES.items() if word and word[1] in names), None)


def one_each(found: Iterable[tuple[str, Path]], where: Path) -> dict[str, Path]:
    """Split → path; two paths of one split are an error, because one of them would be ignored silently."""
    paths: dict[str, Path] = {}
    for split, path in found:
        if split in paths:
            raise UserError(f"{where} has two {split} splits, {paths[split].name} and {path.name}; rename one of them")
        paths[split] = path
    return paths


def beside(path: Path) -> dict[str, Path]:
    """The held-out files beside a file of training images: `x_train.txt` has `x_val.txt` and `x_test.txt`."""
    word = re.compile(r"(?<![a-z])(training|train)(?![a-z])", re.IGNORECASE)
    if not word.search(path.stem):
        return {}
    before, after = word.split(path.stem, maxsplit=1)[::2]
    own = re.compile(re.escape(before) + r"([a-z]+)" + re.escape(after), re.IGNORECASE)
    found = []
    for other in sorted(path.parent.glob(f"*{path.suffix}")):
        match = own.fullmatch(other.stem)
        split = split_of(match[1]) if match else None
        if split and split != "train":
            found.append((split, other))
    return one_each(found, path.parent)


def delimiter_of(lines: list[str], usual: str) -> str:
    """What divides the cells: the first that divides each of the first lines into equally many, two or more."""
    first = [line for line in lines if line.strip()][:LINES_TRIED]
    for delimiter in (usual, *DELIMITERS_TRIED):
        sizes = {len(row) for row in csv.reader(first, delimiter=delimiter)}
        if len(sizes) == 1 and min(sizes) > 1:
            return delimiter
    return usual
