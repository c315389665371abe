"""Images named by .csv and .tsv files: a path, a label and perhaps a split per row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from longtail.config import DataConfig
from longtail.data.images import DecodedImages, FileImages, as_paths
from longtail.data.splits import ReadSplits
from longtail.data.tables import (
    DELIMITERS,
    LABEL_COLUMNS,
    PATH_COLUMNS,
    SPLIT_COLUMN,
    SPLITS,
    ColumnNames,
    Columns,
    delimiter_of,
    held_out_beside,
    is_image,
    is_table,
    labels_of_words,
    named_columns,
    one_each,
    split_of,
    splits_of,
    unclear_columns,
)
from longtail.errors import UserError
from longtail.files.reading import expanded, read_text, reading

Row = tuple[int, list[str]]  # line number and cells


def read_csv(
    path: Path,
    root: Path,
    *,
    class_names: tuple[str, ...] | None = None,
    columns: ColumnNames | None = None,
    skip_broken: bool = False,
) -> FileImages:
    """Images named by a .csv or .tsv file; the classes are those of its labels unless given."""
    return _read(path, root, class_names, columns or ColumnNames(), skip_broken)[0]


def _read(
    path: Path, root: Path, class_names: tuple[str, ...] | None, given: ColumnNames, skip_broken: bool
) -> tuple[FileImages, Columns, np.ndarray | None]:
    """The images of a file, its columns, and the split of each row where a column names it, (N,)."""
    if not path.is_file():
        raise UserError(f"CSV file {path} does not exist")
    if not root.is_dir():
        raise UserError(f"root folder {root} does not exist")
    rows = _rows(path)
    columns = _columns(rows, given, path)
    header, body = (rows[0][1], rows[1:]) if columns.names else ([], rows)
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    for number, row in body:
        if len(row) <= max(columns.path, columns.label) or not row[columns.path] or not row[columns.label]:
            raise UserError(f"{path}, line {number}: expected a path and a label, found {','.join(row)[:80]!r}")

    def where(row: int) -> str:
        return f"{path}, line {body[row][0]}"

    labels, names = labels_of_words([row[columns.label] for _, row in body], class_names, where)
    paths = as_paths([row[columns.path] for _, row in body])
    images = FileImages(
        labels=torch.from_numpy(labels), class_names=names, root=root, paths=paths, skip_broken=skip_broken
    )
    split = next((position for position, name in enumerate(header) if name.lower() == SPLIT_COLUMN), None)
    if split is None:
        return images, columns, None
    return images, columns, splits_of([row[split] if len(row) > split else "" for _, row in body], where)


def read_csv_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The splits of one file with a column `split`, or of the files given or called train.csv, val.csv, test.csv."""
    path = expanded(config.train_list) if config.train_list else _training_file(root)
    given = ColumnNames(config.path_column, config.label_column)
    images, columns, split = _read(path, root, None, given, config.skip_broken)
    listed = (("validation", config.validation_list), ("test", config.test_list))
    named = {name: expanded(file) for name, file in listed if file}
    files = {**held_out_beside(path), **named}
    unlabelled = [name for name, file in files.items() if name not in named and not _has_labels(file, columns)]
    if split is not None and (split != "train").any():
        labelled = [file for name, file in files.items() if name not in unlabelled]
        return splits_by_column(images, split, path.name, columns, labelled)
    held_out = {
        name: read_csv(file, root, class_names=images.class_names, columns=given, skip_broken=config.skip_broken)
        for name, file in files.items()
        if name not in unlabelled
    }
    names_on_disk = {"train": columns.describe(path.name), **{name: files[name].name for name in held_out}}
    unused = tuple(f"{files[name].name} (it has no labels)" for name in unlabelled)
    return ReadSplits(images, held_out.get("validation"), held_out.get("test"), names_on_disk, unused)


def splits_by_column(
    images: DecodedImages, split: np.ndarray, file: str, columns: Columns, others: Sequence[Path]
) -> ReadSplits:
    """The splits that a column of one table names; `others` are files that hold splits, too."""
    if others:
        raise UserError(
            f"{file} has a column {SPLIT_COLUMN!r}, and {others[0].name} holds another split; "
            "use one of them (rename or move the other)"
        )
    subsets = {name: images.subset(np.flatnonzero(split == name)) for name in SPLITS if (split == name).any()}
    if "train" not in subsets:
        raise UserError(f"{file} has no row whose split is train")
    names_on_disk = dict.fromkeys(subsets, f"column {SPLIT_COLUMN!r}") | {"train": columns.describe(file, SPLIT_COLUMN)}
    return ReadSplits(subsets["train"], subsets.get("validation"), subsets.get("test"), names_on_disk)


def paths_of_csv(path: Path) -> list[str]:
    """The paths in a .csv or .tsv file of images, with or without labels."""
    rows = _rows(path)
    first = [cell.lower() for cell in rows[0][1]]
    named = [first.index(name) for name in PATH_COLUMNS if name in first]
    column = named[0] if named else _path_column(rows)
    is_header = bool(named) or len(first) <= column or not is_image(Path(first[column]))
    for number, row in rows[1:]:
        if len(row) <= column or not row[column]:
            raise UserError(f"{path}, line {number}: expected a path, found {','.join(row)[:80]!r}")
    body = rows[1:] if is_header else rows
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    return [row[column] for _, row in body]


def _training_file(root: Path) -> Path:
    """The file of training images below a folder: train.csv, Training.tsv, …"""
    files = sorted(path for path in root.glob("*") if is_table(path))
    named = one_each(((split, path) for path in files if (split := split_of(path.stem))), root)
    return named.get("train", root / "train.csv")


def _has_labels(path: Path, training: Columns) -> bool:
    """Whether a file beside the training file has labels: two cells in a row, and no header without their name."""
    first = {cell.lower() for cell in _rows(path)[0][1]}
    path_name, label_name = (name.lower() for name in training.names or ("path", "label"))
    if not first & {*PATH_COLUMNS, path_name, label_name}:
        return len(first) > 1
    return bool(first & {*LABEL_COLUMNS, label_name})


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


def _columns(rows: list[Row], given: ColumnNames, path: Path) -> Columns:
    """The columns of paths and labels, with their names if there is a header."""
    first = rows[0][1]
    usual = {cell.lower() for cell in first} & {*PATH_COLUMNS, *LABEL_COLUMNS}
    if given != ColumnNames() or (usual and not any(is_image(Path(cell)) for cell in first)):
        return named_columns(first, given, path)
    column = _path_column(rows)
    if len(first) != 2 or column > 1:
        raise unclear_columns(path, first)
    # A header with other names: it is not the name of an image, and the next row has one.
    header = len(rows) > 1 and not is_image(Path(first[column])) and is_image(Path(rows[1][1][column]))
    return Columns(column, 1 - column, (first[column], first[1 - column]) if header else None)


def _path_column(rows: list[Row]) -> int:
    """The first column that holds the name of an image in the first two rows; the first of all otherwise."""
    return next((column for _, row in rows[:2] for column, cell in enumerate(row) if is_image(Path(cell))), 0)
