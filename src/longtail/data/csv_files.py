"""Image sets given by a CSV file: a path and a label per row, with or without a header.

Labels are numbers 0..K-1 or names; names are numbered in alphabetical order. With a header the
columns may stand anywhere (`path` or `image`, `label` or `class`, …) and others are left aside;
without one they are the first two.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from longtail.config import DataConfig
from longtail.core.reading import read_text, reading
from longtail.data.images import FileImages
from longtail.data.labels import from_words
from longtail.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PATH_NAMES = ("path", "image", "file", "filename", "file_name", "image_path", "filepath", "img")
LABEL_NAMES = ("label", "class", "target", "category", "labels", "class_name", "y")

Row = tuple[int, list[str]]


def read_csv(
    path: Path, root: Path, *, class_names: tuple[str, ...] | None = None, skip_broken: bool = False
) -> FileImages:
    """Images named by a .csv or .tsv file; the classes are those found unless given."""
    if not path.is_file():
        raise UserError(f"CSV file {path} does not exist")
    if not root.is_dir():
        raise UserError(f"root folder {root} does not exist")
    rows = _rows(path)
    image_column, label_column, has_header = _columns(rows, path)
    body = rows[1:] if has_header else rows
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    for number, row in body:
        if len(row) <= max(image_column, label_column) or not row[image_column] or not row[label_column]:
            raise UserError(f"{path}, line {number}: expected a path and a label, found {','.join(row)[:80]!r}")
    words = [row[label_column] for _, row in body]
    labels, names = from_words(words, class_names, lambda place: f"{path}, line {body[place][0]}")
    paths = np.array([row[image_column] for _, row in body])
    return FileImages(labels=labels, class_names=names, root=root, paths=paths, skip_broken=skip_broken)


def read_csv_splits(config: DataConfig, root: Path) -> tuple[FileImages, FileImages | None, FileImages | None]:
    """(train, validation, test) of the files named, or of train.csv, validation.csv and test.csv below the root."""

    def read(split: str, class_names: tuple[str, ...]) -> FileImages | None:
        given: str | None = getattr(config, f"{split}_list")
        path = Path(given).expanduser() if given else root / f"{split}.csv"
        if not given and not path.is_file():
            return None
        return read_csv(path, root, class_names=class_names, skip_broken=config.skip_broken)

    first = Path(config.train_list).expanduser() if config.train_list else root / "train.csv"
    train = read_csv(first, root, skip_broken=config.skip_broken)
    return train, read("validation", train.class_names), read("test", train.class_names)


def _rows(path: Path) -> list[Row]:
    """(line number, cells) of every row that is not empty."""
    with reading(path, "a CSV file"):
        lines = read_text(path, "a CSV file").splitlines(keepends=True)
        reader = csv.reader(lines, delimiter=DELIMITERS.get(path.suffix.lower(), ","))
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    if not rows:
        raise UserError(f"CSV file {path} is empty")
    return rows


def _columns(rows: list[Row], path: Path) -> tuple[int, int, bool]:
    """Where paths and labels stand, and whether the first row is a header."""
    first = [cell.lower() for cell in rows[0][1]]
    images = [first.index(name) for name in PATH_NAMES if name in first]
    labels = [first.index(name) for name in LABEL_NAMES if name in first]
    if images and labels:
        return images[0], labels[0], True
    if images:
        raise UserError(f"{path} has no column for the label; call it {' or '.join(LABEL_NAMES[:2])}")
    # A header in other words: no image is called so, while the next row's is.
    return 0, 1, len(rows) > 1 and not _is_image(rows[0]) and _is_image(rows[1])


def _is_image(row: Row) -> bool:
    return Path(row[1][0]).suffix.lower() in SUFFIXES
