"""Image sets given by a CSV file: a path and a label per row, with or without a header.

Labels are numbers 0..K-1 or names; names are numbered in alphabetical order. With a header the
columns may be in any order (`path` or `image`, `label` or `class`, …, or the names given) and other columns
are ignored; without one there are two columns. Cells are divided by commas, semicolons or tabs.
A column `split` (train, validation, test) divides the rows; without it held-out images are in files of their own
(`train.csv`, `val.csv`, `test.csv`).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longtail.config import DataConfig
from longtail.core.opening import expanded
from longtail.core.reading import read_text, reading
from longtail.data.file_names import DELIMITERS, beside, delimiter_of, is_image, is_table, one_each, split_of
from longtail.data.images import FileImages, as_paths
from longtail.data.labels import from_words
from longtail.data.splits import ReadSplits
from longtail.data.table_columns import (
    LABEL_NAMES,
    PATH_NAMES,
    SPLIT_NAME,
    Columns,
    Told,
    by_column,
    named_columns,
    split_words,
    which_columns,
)
from longtail.errors import UserError

Row = tuple[int, list[str]]


def read_csv(
    path: Path,
    root: Path,
    *,
    class_names: tuple[str, ...] | None = None,
    told: Told | None = None,
    skip_broken: bool = False,
) -> FileImages:
    """Images named by a .csv or .tsv file; the classes are those found unless given."""
    return _read(path, root, class_names, told or Told(), skip_broken)[0]


def _read(
    path: Path, root: Path, class_names: tuple[str, ...] | None, told: Told, skip_broken: bool
) -> tuple[FileImages, Columns, np.ndarray | None]:
    """The images of a file, its columns, and the split of each row where a column names it, (N,)."""
    if not path.is_file():
        raise UserError(f"CSV file {path} does not exist")
    if not root.is_dir():
        raise UserError(f"root folder {root} does not exist")
    rows = _rows(path)
    columns = _columns(rows, told, path)
    header, body = (rows[0][1], rows[1:]) if columns.names else ([], rows)
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    for number, row in body:
        if len(row) <= max(columns.path, columns.label) or not row[columns.path] or not row[columns.label]:
            raise UserError(f"{path}, line {number}: expected a path and a label, found {','.join(row)[:80]!r}")

    def where(place: int) -> str:
        return f"{path}, line {body[place][0]}"

    labels, names = from_words([row[columns.label] for _, row in body], class_names, where)
    paths = as_paths([row[columns.path] for _, row in body])
    images = FileImages(labels=labels, class_names=names, root=root, paths=paths, skip_broken=skip_broken)
    places = [place for place, name in enumerate(header) if name.lower() == SPLIT_NAME]
    if not places:
        return images, columns, None
    words = [row[places[0]] if len(row) > places[0] else "" for _, row in body]
    return images, columns, split_words(words, where)


def paths_of_table(path: Path) -> list[str]:
    """The paths in a .csv or .tsv file of images, with or without labels."""
    rows = _rows(path)
    first = [cell.lower() for cell in rows[0][1]]
    named = [first.index(name) for name in PATH_NAMES if name in first]
    column = named[0] if named else _path_column(rows)
    is_header = bool(named) or len(first) <= column or not is_image(Path(first[column]))
    for number, row in rows[1:]:
        if len(row) <= column or not row[column]:
            raise UserError(f"{path}, line {number}: expected a path, found {','.join(row)[:80]!r}")
    body = rows[1:] if is_header else rows
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    return [row[column] for _, row in body]


def read_csv_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The splits of one file with a column `split`, or of the files given or called train.csv, val.csv, test.csv."""
    path = expanded(config.train_list) if config.train_list else _training_file(root)
    told = Told.of(config)
    images, columns, split = _read(path, root, None, told, config.skip_broken)
    named = (("validation", config.validation_list), ("test", config.test_list))
    given = {name: expanded(own) for name, own in named if own}
    files = {**beside(path), **given}
    unlabelled = [name for name, file in files.items() if name not in given and not _has_labels(file, columns)]
    if split is not None and (split != "train").any():
        labelled = [file for name, file in files.items() if name not in unlabelled]
        return by_column(images, split, path.name, columns, labelled)
    held_out = {
        name: read_csv(file, root, class_names=images.class_names, told=told, skip_broken=config.skip_broken)
        for name, file in files.items()
        if name not in unlabelled
    }
    places = {"train": columns.place(path.name), **{name: files[name].name for name in held_out}}
    unused = tuple(f"{files[name].name} (it has no labels)" for name in unlabelled)
    return ReadSplits(images, held_out.get("validation"), held_out.get("test"), places, unused)


def _training_file(root: Path) -> Path:
    """The file of training images below a folder: train.csv, Training.tsv, …"""
    files = sorted(path for path in root.glob("*") if is_table(path))
    named = one_each(((split, path) for path in files if (split := split_of(path.stem))), root)
    return named.get("train", root / "train.csv")


def _has_labels(path: Path, training: Columns) -> bool:
    """Whether a file beside the training file has labels: two cells in a row, and no header without their name."""
    first = {cell.lower() for cell in _rows(path)[0][1]}
    own = {name.lower() for name in training.names or ()}
    if not first & {*PATH_NAMES, *own}:
        return len(first) > 1
    return bool(first & {*LABEL_NAMES, *(name.lower() for name in (training.names or ())[1:])})


def _rows(path: Path) -> list[Row]:
    """(line number, cells) of every row that is not empty."""
    with reading(path, "a CSV file"):
        lines = read_text(path, "a CSV file").splitlines(keepends=True)
        reader = csv.reader(lines, delimiter=delimiter_of(lines, DELIMITERS.get(path.suffix.lower(), ",")))
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
        if broken := [number for number, row in rows if any("\0" in cell for cell in row)]:
            raise UserError(f"{path}, line {broken[0]}: it holds a NUL character")
    if not rows:
        raise UserError(f"CSV file {path} is empty")
    return rows


def _columns(rows: list[Row], told: Told, path: Path) -> Columns:
    """The columns of paths and labels, with their names if there is a header."""
    first = rows[0][1]
    usual = {cell.lower() for cell in first} & {*PATH_NAMES, *LABEL_NAMES}
    if told or (usual and not any(is_image(Path(cell)) for cell in first)):
        return _with_header(first, *named_columns(first, told, path))
    column = _path_column(rows)
    if len(first) != 2 or column > 1:
        raise which_columns(path, first)
    # A header with other names: it is not the name of an image, and the next row has one.
    if len(rows) > 1 and not is_image(Path(first[column])) and is_image(Path(rows[1][1][column])):
        return _with_header(first, column, 1 - column)
    return Columns(column, 1 - column)


def _with_header(header: Sequence[str], path: int, label: int) -> Columns:
    return Columns(path, label, (header[path], header[label]))


def _path_column(rows: list[Row]) -> int:
    """The first column that holds the name of an image in the first two rows; the first of all otherwise."""
    found = [place for _, row in rows[:2] for place, cell in enumerate(row) if is_image(Path(cell))]
    return found[0] if found else 0
