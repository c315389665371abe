"""Image sets given by a CSV file: a path and a label per row, with or without a header.

Labels are numbers 0..K-1 or names; names are numbered in alphabetical order. With a header the
columns may be in any order (`path` or `image`, `label` or `class`, …) and other columns are ignored;
without one they are the first two. A column `split` (train, validation, test) divides the rows;
without it held-out images are in files of their own (`train.csv`, `val.csv`, `test.csv`).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from longtail.config import DataConfig
from longtail.core.reading import read_text, reading
from longtail.data.file_names import DELIMITERS, SPLITS, beside, is_image, is_table, one_each, split_of
from longtail.data.images import FileImages
from longtail.data.labels import from_words
from longtail.data.splits import ReadSplits
from longtail.errors import UserError

PATH_NAMES = ("path", "image", "file", "filename", "file_name", "image_path", "filepath", "img")
LABEL_NAMES = ("label", "class", "target", "category", "labels", "class_name", "y")

Row = tuple[int, list[str]]


def read_csv(
    path: Path, root: Path, *, class_names: tuple[str, ...] | None = None, skip_broken: bool = False
) -> FileImages:
    """Images named by a .csv or .tsv file; the classes are those found unless given."""
    return _read(path, root, class_names, skip_broken)[0]


def _read(
    path: Path, root: Path, class_names: tuple[str, ...] | None, skip_broken: bool
) -> tuple[FileImages, np.ndarray | None]:
    """The images of a file, and the split of each row where a column names it, (N,)."""
    if not path.is_file():
        raise UserError(f"CSV file {path} does not exist")
    if not root.is_dir():
        raise UserError(f"root folder {root} does not exist")
    rows = _rows(path)
    image_column, label_column, has_header = _columns(rows, path)
    header, body = (rows[0][1], rows[1:]) if has_header else ([], rows)
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    for number, row in body:
        if len(row) <= max(image_column, label_column) or not row[image_column] or not row[label_column]:
            raise UserError(f"{path}, line {number}: expected a path and a label, found {','.join(row)[:80]!r}")
    words = [row[label_column] for _, row in body]
    labels, names = from_words(words, class_names, lambda place: f"{path}, line {body[place][0]}")
    paths = np.array([row[image_column] for _, row in body])
    images = FileImages(labels=labels, class_names=names, root=root, paths=paths, skip_broken=skip_broken)
    return images, _split_column(header, body, path)


def paths_of_table(path: Path) -> list[str]:
    """The paths in a .csv or .tsv file of images, with or without labels."""
    rows = _rows(path)
    first = [cell.lower() for cell in rows[0][1]]
    named = [first.index(name) for name in PATH_NAMES if name in first]
    column = named[0] if named else 0
    is_header = bool(named) or not is_image(Path(rows[0][1][0]))
    for number, row in rows[1:]:
        if len(row) <= column or not row[column]:
            raise UserError(f"{path}, line {number}: expected a path, found {','.join(row)[:80]!r}")
    body = rows[1:] if is_header else rows
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    return [row[column] for _, row in body]


def _split_column(header: list[str], body: list[Row], path: Path) -> np.ndarray | None:
    """The split of each row, if the file has a column `split`."""
    places = [place for place, name in enumerate(header) if name.lower() == "split"]
    if not places:
        return None
    found = []
    for number, row in body:
        word = row[places[0]] if len(row) > places[0] else ""
        if (split := split_of(word)) is None:
            raise UserError(f"{path}, line {number}: the split {word!r} is none of train, validation, test")
        found.append(split)
    return np.array(found)


def read_csv_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The splits of one file with a column `split`, or of the files given or called train.csv, val.csv, test.csv."""
    path = Path(config.train_list).expanduser() if config.train_list else _training_file(root)
    images, split = _read(path, root, None, config.skip_broken)
    if split is not None:
        return _by_column(images, split, path)
    named = (("validation", config.validation_list), ("test", config.test_list))
    given = {name: Path(own).expanduser() for name, own in named if own}
    files = {**beside(path), **given}
    unlabelled = [name for name, file in files.items() if name not in given and not _has_labels(file)]
    held_out = {
        name: read_csv(file, root, class_names=images.class_names, skip_broken=config.skip_broken)
        for name, file in files.items()
        if name not in unlabelled
    }
    places = {"train": path.name, **{name: files[name].name for name in held_out}}
    unused = tuple(f"{files[name].name} (it has no labels)" for name in unlabelled)
    return ReadSplits(images, held_out.get("validation"), held_out.get("test"), places, unused)


def _training_file(root: Path) -> Path:
    """The file of training images below a folder: train.csv, Training.tsv, …"""
    files = sorted(path for path in root.glob("*") if is_table(path))
    named = one_each(((split, path) for path in files if (split := split_of(path.stem))), root)
    return named.get("train", root / "train.csv")


def _by_column(images: FileImages, split: np.ndarray, path: Path) -> ReadSplits:
    parts = {name: images.subset(np.flatnonzero(split == name)) for name in SPLITS if (split == name).any()}
    if "train" not in parts:
        raise UserError(f"{path} has no row whose split is train")
    places = dict.fromkeys(parts, f"{path.name}, column split")
    return ReadSplits(parts["train"], parts.get("validation"), parts.get("test"), places)


def _has_labels(path: Path) -> bool:
    """Whether the rows of a file have at least two cells, and not a header that names only images."""
    first = [cell.lower() for cell in _rows(path)[0][1]]
    return len(first) > 1 and (not set(first) & set(PATH_NAMES) or bool(set(first) & set(LABEL_NAMES)))


def _rows(path: Path) -> list[Row]:
    """(line number, cells) of every row that is not empty."""
    with reading(path, "a CSV file"):
        lines = read_text(path, "a CSV file").splitlines(keepends=True)
        reader = csv.reader(lines, delimiter=DELIMITERS.get(path.suffix.lower(), ","))
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
        if broken := [number for number, row in rows if any("\0" in cell for cell in row)]:
            raise UserError(f"{path}, line {broken[0]}: it holds a NUL character")
    if not rows:
        raise UserError(f"CSV file {path} is empty")
    return rows


def _columns(rows: list[Row], path: Path) -> tuple[int, int, bool]:
    """The columns of paths and labels, and whether the first row is a header."""
    first = [cell.lower() for cell in rows[0][1]]
    images = [first.index(name) for name in PATH_NAMES if name in first]
    labels = [first.index(name) for name in LABEL_NAMES if name in first]
    if images and labels:
        return images[0], labels[0], True
    if images:
        raise UserError(f"{path} has no column for the label; call it {' or '.join(LABEL_NAMES[:2])}")
    # A header with other names: it is not the name of an image, and the next row has one.
    is_header = len(rows) > 1 and not is_image(Path(rows[0][1][0])) and is_image(Path(rows[1][1][0]))
    return 0, 1, is_header
