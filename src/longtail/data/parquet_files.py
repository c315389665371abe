"""Image sets in Parquet files: compressed images and labels in columns, as the Hugging Face hub keeps them, or paths.

All labels and paths are read first, images when they are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtail.config import DataConfig
from longtail.core.opening import expanded
from longtail.core.reading import reading, require_file
from longtail.data.file_names import SPLITS, split_of
from longtail.data.images import DecodedImages, FileImages, as_paths
from longtail.data.labels import from_names, from_numbers
from longtail.data.parquet_images import ParquetImages, pyarrow_parquet
from longtail.data.parquet_pages import require_plausible
from longtail.data.splits import ReadSplits
from longtail.data.table_columns import PATH_NAMES, SPLIT_NAME, Columns, Told, by_column, named_columns, split_words
from longtail.errors import UserError

IMAGE_NAMES = ("image", "img", "picture", "images", *PATH_NAMES)
KIND = "a whole Parquet file"


def parquet_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Split → its files below a folder or its `data` folder: `train-00000-of-00002.parquet`, …

    Files that name no split are for training.
    """
    found = sorted([*folder.glob("*.parquet"), *(folder / "data").glob("*.parquet")])
    of_split: dict[str, tuple[Path, ...]] = {}
    for file in found:
        if split := _split_named(file):
            of_split[split] = (*of_split.get(split, ()), file)
    return of_split or {"train": tuple(found)}


def read_parquet(
    files: Sequence[Path],
    *,
    root: Path | None = None,
    class_names: tuple[str, ...] | None = None,
    told: Told | None = None,
    skip_broken: bool = False,
) -> DecodedImages:
    """Images of Parquet files, or the images that they name; class names are those the files know, unless given.

    Args:
        files: in this order.
        root: folder that paths are relative to (default: the folder of the first file).
        class_names: names of the classes.
        told: names of the columns.
        skip_broken: skip images that cannot be read instead of stopping.
    """
    return _read(files, root, class_names, told or Told(), skip_broken)[0]


def _read(
    files: Sequence[Path], root: Path | None, class_names: tuple[str, ...] | None, told: Told, skip_broken: bool
) -> tuple[DecodedImages, Columns, np.ndarray | None]:
    """The images, the columns that hold them, and the split of each row where a column names it, (N,)."""
    columns = [_columns(file, told) for file in files]
    image, label = columns[0].names or ("", "")

    def where(place: int) -> str:
        return f"{files[0].parent}, row {place}"

    values = _cells(files, [found.names[1] for found in columns if found.names])
    if len(values) == 0:
        raise UserError(f"{files[0]} has no rows")
    with reading(files[0], KIND):
        schema = pyarrow_parquet().read_schema(files[0])
        known = class_names or _named_classes(schema, label)
    if values.dtype.kind in "iu":
        labels, names = from_numbers(values, known, where)
    elif all(isinstance(value, str) for value in values):
        labels, names = from_names(values.tolist(), known, where)
    else:
        raise UserError(f"{files[0]} has labels that are neither whole numbers nor names, or some are missing")
    kept: dict[str, Any] = {"labels": labels, "class_names": names, "skip_broken": skip_broken}
    images: DecodedImages
    if _is_text(schema.field(image).type):
        paths = _words(_cells(files, [image] * len(files)), where, "path")
        images = FileImages(**kept, root=root or files[0].parent, paths=as_paths(paths))
    else:
        images = ParquetImages(**kept, files=tuple(files), column=image, lines=np.arange(len(values)))
    if SPLIT_NAME not in schema.names:
        return images, columns[0], None
    splits = _words(_cells(files, [SPLIT_NAME] * len(files)), where, "split")
    return images, columns[0], split_words(splits, where)


def paths_of_parquet(file: Path) -> list[str]:
    """The paths in a Parquet file of images, with or without labels."""
    with reading(file, KIND):
        schema = pyarrow_parquet().read_schema(file)
        texts = [name for name in schema.names if _is_text(schema.field(name).type)]
    named = [name for usual in PATH_NAMES for name in texts if name.lower() == usual]
    if not named and len(texts) != 1:
        raise UserError(f"{file} has no column 'path' of paths (columns: {', '.join(schema.names)[:200]})")
    column = named[0] if named else texts[0]
    return _words(_cells([file], [column]), lambda place: f"{file}, row {place}", "path")


def _columns(file: Path, told: Told) -> Columns:
    if not file.is_file():
        raise UserError(f"Parquet file {file} does not exist")
    require_file(file)
    with reading(file, KIND):
        names = pyarrow_parquet().read_schema(file).names
        path, label = named_columns(names, told, file, IMAGE_NAMES)
    return Columns(path, label, (names[path], names[label]))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner))


def _words(values: np.ndarray, where: Any, what: str) -> list[str]:
    """Cells that must all be text."""
    for place, value in enumerate(values):
        if not isinstance(value, str) or not value or "\0" in value:
            raise UserError(f"{where(place)}: expected a {what}, found {str(value)[:80]!r}")
    return [str(value) for value in values]


def _cells(files: Sequence[Path], columns: Sequence[str]) -> np.ndarray:
    """One column of each file, (N,): numbers, or names; each different name is stored once."""
    parts = []
    for file, column in zip(files, columns, strict=True):
        with reading(file, KIND):
            parquet = pyarrow_parquet()
            require_plausible(parquet.ParquetFile(file).metadata, file, column)
            found = parquet.read_table(file, columns=[column], read_dictionary=[column]).column(0)
            for chunk in found.chunks:
                if hasattr(chunk, "dictionary"):
                    words = np.array([*chunk.dictionary.to_pylist(), None], object)
                    parts.append(words[chunk.indices.fill_null(len(words) - 1).to_numpy()])
                else:
                    parts.append(chunk.to_numpy(zero_copy_only=False))
    with reading(files[0], KIND):
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def read_parquet_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The files that were given, or train-*.parquet, … in the root folder; or one table with a column `split`."""
    files = _beside(expanded(config.train_list)) if config.train_list else parquet_files(root)
    for name, given in zip(SPLITS, (config.train_list, config.validation_list, config.test_list), strict=True):
        if given:
            files[name] = (expanded(given),)
    if not files.get("train"):
        raise UserError(f"no training images in {root}; expected {root}/train-*.parquet, or give --train-list FILE")
    told = Told.of(config)
    train, columns, split = _read(files["train"], root, None, told, config.skip_broken)
    if split is not None and (split != "train").any():
        others = [of_split[0] for name, of_split in files.items() if name != "train"]
        return by_column(train, split, _called(files["train"]), columns, others)
    held_out = {
        name: read_parquet(
            of_split, root=root, class_names=train.class_names, told=told, skip_broken=config.skip_broken
        )
        for name, of_split in files.items()
        if name != "train"
    }
    places = {name: _called(of_split) for name, of_split in files.items()} | {
        "train": columns.place(_called(files["train"]))
    }
    return ReadSplits(train, held_out.get("validation"), held_out.get("test"), places)


def _beside(file: Path) -> dict[str, tuple[Path, ...]]:
    """The files of the other splits in the folder of a file that is called train-…"""
    return parquet_files(file.parent) if _split_named(file) == "train" else {}


def _split_named(file: Path) -> str | None:
    """The split that the first word of a file's name means."""
    return split_of(re.split(r"[-_.]", file.name, maxsplit=1)[0])


def _called(files: Sequence[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _named_classes(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names that the `datasets` library writes beside a column of class labels."""
    details = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = details.get("info", {}).get("features", {})
    return tuple(map(str, features.get(label, {}).get("names") or ())) or None
