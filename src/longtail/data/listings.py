"""Images in folders, one per class, and images named by text files: lists with a path and a label, .csv and .tsv files.

Lists are published like this for ImageNet-LT, Places-LT and iNaturalist 2018 (`train/n01440764/x.JPEG 0`); paths are
relative to a root folder.

Data: Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019 (the first two);
Van Horn et al., The iNaturalist Species Classification and Detection Dataset, CVPR 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from longtail.config import DataConfig
from longtail.data.images import FileImages
from longtail.data.parquet import paths_in_parquet
from longtail.data.tables import (
    IMAGE_SUFFIXES,
    LABEL_COLUMNS,
    PATH_COLUMNS,
    SPLIT_COLUMN,
    SPLITS,
    ClassNames,
    ReadSplits,
    Table,
    by_split,
    csv_reader,
    held_out_beside,
    is_csv,
    is_image,
    is_whole_number,
    labels_of_words,
    named_columns,
    read_splits,
    split_of,
    splits_of,
    unclear_columns,
)
from longtail.errors import UserError
from longtail.files.reading import expanded, read_text, reading

Row = tuple[int, list[str]]  # line number and cells
LIST_SUFFIXES = (".txt", ".lst", ".list")


def _require(kind: str, path: Path, root: Path) -> None:
    if not path.is_file():
        raise UserError(f"{kind} {path} does not exist")
    if not root.is_dir():
        raise UserError(f"root folder {root} does not exist")


def read_list(path: Path, root: Path, config: DataConfig, class_names: ClassNames | None = None) -> Table:
    """Images named by a list file; the number of classes is the largest label + 1 unless given."""
    _require("list file", path, root)
    rows: list[Row] = []
    for number, line in _lines(path):
        file, *label = line.rsplit(maxsplit=1)
        if not label or not is_whole_number(label[0]) or "\0" in line:
            raise UserError(
                f"{path}, line {number}: expected a path and the number of its class (photos/1.jpg 0), found "
                f"{line[:80]!r}; class names can be given in a CSV file with columns path and label"
            )
        rows.append((number, [file, *label]))
    return _table(path, rows, (0, 1), root, config, class_names)


def _table(
    path: Path, rows: list[Row], columns: tuple[int, int], root: Path, config: DataConfig, names: ClassNames | None
) -> Table:
    """The images in rows with these columns of paths and labels."""
    files, words = ([cells[column] for _, cells in rows] for column in columns)
    labels, names = labels_of_words(words, names, lambda row: f"{path}, line {rows[row][0]}")
    return Table(FileImages.of(files, labels, names, root, config.skip_broken))


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a list that are not empty, and their numbers."""
    lines = [
        (number, line) for number, line in enumerate(read_text(path, "a list file").splitlines(), 1) if line.strip()
    ]
    if not lines:
        raise UserError(f"list file {path} is empty")
    return lines


def read_lists(
    config: DataConfig, root: Path, published: tuple[str | None, ...] = (None, None, None), classes: int | None = None
) -> ReadSplits:
    """The list files that are named, `published` below the root folder, or beside the training list."""
    if config.train_list and is_csv(Path(config.train_list)):
        return read_csv_splits(config, root)
    given = (config.train_list, config.validation_list, config.test_list)
    paths: dict[str, Path] = {}
    for split, file, default in zip(SPLITS, given, published, strict=True):
        if file or default:
            paths[split] = expanded(file) if file else root / str(default)
    if "train" not in paths:
        raise UserError("data set 'lists' needs --train-list FILE (a path and a label per line) and --root FOLDER")
    if config.train_list:
        paths = {**held_out_beside(paths["train"]), **paths}
    of_dataset = None if classes is None else tuple(map(str, range(classes)))
    return read_splits(
        paths, lambda path, names: read_list(path, root, config, names or of_dataset), lambda path: path.name
    )


def read_csv(path: Path, root: Path, config: DataConfig, class_names: ClassNames | None = None) -> Table:
    """Images named by a .csv or .tsv file; the classes are those of its labels unless given."""
    _require("CSV file", path, root)
    rows = _rows(path)
    columns, has_header = _columns(rows, config, path)
    header, body = (rows[0][1], rows[1:]) if has_header else ([], rows)
    _require_cells(path, body, columns, "a path and a label")
    table = _table(path, body, columns, root, config, class_names)
    if not has_header:
        return table
    table = table._replace(columns=tuple(header[column] for column in columns))
    split = next((position for position, name in enumerate(header) if name.lower() == SPLIT_COLUMN), None)
    if split is None:
        return table
    words = [cells[split] if len(cells) > split else "" for _, cells in body]
    return table._replace(splits=splits_of(words, lambda row: f"{path}, line {body[row][0]}"))


def read_csv_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The splits of one file with a column `split`, or of the files given or called train.csv, val.csv, test.csv."""
    if config.train_list:
        path = expanded(config.train_list)
    else:
        files = sorted(path for path in root.glob("*") if is_csv(path))
        named = by_split(((split, path) for path in files if (split := split_of(path.stem))), root)
        path = named.get("train", root / "train.csv")
    train = read_csv(path, root, config)
    given = (("validation", config.validation_list), ("test", config.test_list))
    named = {split: expanded(file) for split, file in given if file}
    beside = {split: file for split, file in held_out_beside(path).items() if split not in named}
    unlabelled = {split: file for split, file in beside.items() if not _has_labels(file, train.columns)}
    return read_splits(
        {split: file for split, file in {"train": path, **beside, **named}.items() if split not in unlabelled},
        lambda file, class_names: read_csv(file, root, config, class_names) if class_names else train,
        lambda file: file.name,
        (f"{file.name} (it has no labels)" for file in unlabelled.values()),
    )


def paths_in_csv(path: Path) -> list[str]:
    """The paths in a .csv or .tsv file of images, with or without labels."""
    rows = _rows(path)
    first = [cell.lower() for cell in rows[0][1]]
    named = [first.index(name) for name in PATH_COLUMNS if name in first]
    column = named[0] if named else _path_column(rows)
    is_header = bool(named) or len(first) <= column or not is_image(Path(first[column]))
    body = rows[1:] if is_header else rows
    _require_cells(path, body, (column,), "a path")
    return [cells[column] for _, cells in body]


def _require_cells(path: Path, body: list[Row], columns: tuple[int, ...], what: str) -> None:
    if not body:
        raise UserError(f"CSV file {path} has no rows below its header")
    for number, cells in body:
        if len(cells) <= max(columns) or not all(cells[column] for column in columns):
            raise UserError(f"{path}, line {number}: expected {what}, found {','.join(cells)[:80]!r}")


def _has_labels(path: Path, training_columns: tuple[str, ...]) -> bool:
    """Whether a file beside the training file has labels: two cells in a row, and no header without their name."""
    first = {cell.lower() for cell in _rows(path)[0][1]}
    path_name, label_name = (name.lower() for name in training_columns or ("path", "label"))
    if not first & {*PATH_COLUMNS, path_name, label_name}:
        return len(first) > 1
    return bool(first & {*LABEL_COLUMNS, label_name})


def _rows(path: Path) -> list[Row]:
    """(line number, cells) of every row that is not empty."""
    with reading(path, "a CSV file"):
        reader = csv_reader(read_text(path, "a CSV file").splitlines(keepends=True), path)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
        if broken := [number for number, row in rows if any("\0" in cell for cell in row)]:
            raise UserError(f"{path}, line {broken[0]}: it holds a NUL character")
    if not rows:
        raise UserError(f"CSV file {path} is empty")
    return rows


def _columns(rows: list[Row], config: DataConfig, path: Path) -> tuple[tuple[int, int], bool]:
    """The columns of paths and labels, and whether the first row is a header."""
    first = rows[0][1]
    usual = {cell.lower() for cell in first} & {*PATH_COLUMNS, *LABEL_COLUMNS}
    given = config.path_column or config.label_column
    if given or (usual and not any(is_image(Path(cell)) for cell in first)):
        return named_columns(first, config, path), True
    column = _path_column(rows)
    if len(first) != 2 or column > 1:
        raise unclear_columns(path, first)
    # A header with other names: it is not the name of an image, and the next row has one.
    has_header = len(rows) > 1 and not is_image(Path(first[column])) and is_image(Path(rows[1][1][column]))
    return (column, 1 - column), has_header


def _path_column(rows: list[Row]) -> int:
    """The first column that holds the name of an image in the first two rows; the first of all otherwise."""
    return next((column for _, row in rows[:2] for column, cell in enumerate(row) if is_image(Path(cell))), 0)


def read_folder(root: Path, config: DataConfig, class_names: ClassNames | None = None) -> Table:
    """Images below `root/<class>/…`; classes are the folders in alphabetical order unless named."""
    folders = tuple(folder.name for folder in _folders(root))
    names = class_names or folders
    if not names:
        raise UserError(f"{root} has no folder per class; expected {root}/<class>/<image>")
    if unknown := sorted(set(folders) - set(names)):
        raise UserError(f"{root} has classes the training set does not: {', '.join(unknown[:5])}")
    if len(names) == 1:
        inside = " (its folders may be the classes: try that one)" if _folders(root / names[0]) else ""
        raise UserError(f"{root} has a single class, {names[0]}{inside}; a classifier needs two at least")
    of_class = [sorted(str(file.relative_to(root)) for file in _images_below(root / name)) for name in names]
    if not any(of_class):
        raise _no_images(root)
    labels = np.repeat(np.arange(len(names)), [len(paths) for paths in of_class])
    return Table(FileImages.of([path for paths in of_class for path in paths], labels, names, root, config.skip_broken))


def read_folders(config: DataConfig, root: Path) -> ReadSplits:
    """The folders of splits below a folder (Train/, val/, test/, …); without them every folder is a class."""
    folders = _folders(root)
    named = [(split, folder) for folder in folders if (split := split_of(folder.name))]
    # A class folder that has the name of a split directly holds images.
    splits = by_split((one for one in named if _folders(one[1]) and not any(map(is_image, one[1].iterdir()))), root)
    if not splits:
        return ReadSplits(read_folder(root, config).images)
    if "train" not in splits:
        held_out = ", ".join(folder.name for folder in splits.values())
        raise UserError(f"{root} has {held_out} but no folder of training images; call it train")
    unused = (
        f"{folder.name}/{' (no folder per class)' if split_of(folder.name) else ''}"
        for folder in folders
        if folder not in splits.values()
    )
    return read_splits(
        splits, lambda folder, names: read_folder(folder, config, names), lambda folder: f"{folder.name}/", unused
    )


def _folders(root: Path) -> list[Path]:
    """Folders in alphabetical order, without hidden and system folders."""
    if not root.is_dir():
        raise UserError(f"image folder {root} does not exist")
    folders = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    return sorted(folders, key=lambda path: path.name)


def _images_below(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if is_image(file)]


def _no_images(folder: Path) -> UserError:
    return UserError(f"no images below {folder} (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")


def find_images(
    paths: Iterable[Path | str], class_names: ClassNames, *, root: str | None = None, skip_broken: bool = False
) -> FileImages:
    """New images at some paths, in their order; they have no labels, so every label is 0.

    Args:
        paths: images, folders (with all folders below), and lists: text files with a path per line (a label after it
            is ignored), CSV or Parquet files.
        class_names: names of the possible classes.
        root: folder that the paths of a list are relative to (default: the folder of the list).
        skip_broken: skip images that cannot be read instead of stopping.
    """
    images = [str(image) for path in paths for image in _images_at(expanded(path), root)]
    if not images:
        raise UserError("no images were given: name image files, folders, or a list of files")
    return FileImages.of(images, np.zeros(len(images), np.int64), class_names, Path(), skip_broken)


def _images_at(path: Path, root: str | None) -> list[Path]:
    if path.is_dir():
        if images := _images_below(path):
            return sorted(images)
        raise _no_images(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file or a folder" if path.exists() else f"{path} does not exist")
    suffix = path.suffix.lower()
    if is_csv(path):
        names = paths_in_csv(path)
    elif suffix == ".parquet":
        names = paths_in_parquet(path)
    elif suffix in LIST_SUFFIXES:
        names = [_without_label(line.strip()) for _, line in _lines(path)]
    else:
        return [path]  # with any suffix: reading it shows whether it is an image
    folder = expanded(root) if root else path.parent
    return [folder / name for name in names]


def _without_label(line: str) -> str:
    """The path in a line of a list.

    >>> _without_label("cats/my cat.jpg 3"), _without_label("cats/my cat.jpg")
    ('cats/my cat.jpg', 'cats/my cat.jpg')
    """
    path, *label = line.rsplit(maxsplit=1)
    return path if label and label[0].isdigit() and is_image(Path(path)) else line
