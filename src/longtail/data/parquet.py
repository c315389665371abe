"""Images in Parquet files, as the Hugging Face hub stores them, or paths in Parquet tables; read by Arrow.

The sizes that a file states are checked before it is read, and the bytes that come out are counted while its images
are copied. Images are copied once, to a file of the cache folder that is mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from longtail.config import DataConfig
from longtail.data.images import DecodedImages, FileImages, file_state, regular_file
from longtail.data.tables import (
    PATH_COLUMNS,
    SPLIT_COLUMN,
    SPLITS,
    ClassNames,
    ReadSplits,
    Table,
    Where,
    labels_of_names,
    labels_of_numbers,
    named_columns,
    read_splits,
    split_of,
    splits_of,
)
from longtail.errors import UserError
from longtail.files.atomic import cache_folder, locked, replacing
from longtail.files.reading import MAX_RATIO, MAX_UNPACKED, expanded, reading, require_file

MAX_ROWS = 1 << 20  # and one more for each byte of the file: an image takes more
COPIED_ROWS = 256  # at a time
COPIED_BYTES = 1 << 30  # at a time, if every row refers to one value that is as large as its row group
IMAGE_COLUMNS = ("image", "img", "picture", "images", *PATH_COLUMNS)
KIND = "a whole Parquet file"


def pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("Parquet files need pyarrow: pip install 'longtail[parquet]'") from error
    return parquet


def open_parquet(path: Path) -> tuple[Any, int, int]:
    """A file that states no more rows and bytes than it can hold, and the bytes of its largest row group.

    Also the most bytes that it may unpack to: images and words compress little.
    """
    size = require_file(path)  # opening a pipe could wait for ever
    with reading(path, KIND):
        file = pyarrow_parquet().ParquetFile(path)
        rows, most = file.metadata.num_rows, MAX_UNPACKED + MAX_RATIO * size
        groups = [file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups)]
    if rows > MAX_ROWS + size:
        raise UserError(f"{path} would unpack to {rows:,} rows, far more than it holds; it is not read")
    if sum(groups) > most:
        raise UserError(f"{path} would unpack to {sum(groups):,} bytes, far more than it holds; it is not read")
    return file, max(groups, default=0), most


@dataclass(frozen=True, kw_only=True)
class ParquetImages(DecodedImages):
    """Images in a column of Parquet files."""

    files: tuple[Path, ...]
    column: str
    lines: np.ndarray = field(repr=False)  # row of each image, counted over all files
    per_image: ClassVar[tuple[str, ...]] = ("lines",)

    def path(self, index: int) -> Path:
        """FILE/row N, the name of an image in error messages."""
        row = int(self.lines[index])
        for file in self.files:
            count = pyarrow_parquet().ParquetFile(file).metadata.num_rows
            if row < count:
                break
            row -= count
        return file / f"row {row}"

    def _samples(self) -> bytes:
        return self.state([(file.name, file.stat().st_size) for file in self.files])

    def state(self, files: list[Any] | None = None) -> bytes:
        described = json.dumps([files or [file_state(file) for file in self.files], self.column])
        return described.encode() + self.lines.astype(np.int64).tobytes()

    def source(self, index: int) -> Path | BytesIO:
        cell = _copied(self.files, self.column)[int(self.lines[index])].as_py()
        content, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if content is None and name:
            return regular_file(self.path(index).parent.parent / str(name))
        return BytesIO(content or b"")


@lru_cache(maxsize=8)
def _copied(files: tuple[Path, ...], column: str) -> Any:
    """The image column of all files as one memory-mapped array; copied once, by one process."""
    import pyarrow as pa

    states = [file_state(file) for file in files]
    key = hashlib.sha256(json.dumps([states, column]).encode()).hexdigest()[:24]
    path = cache_folder() / "parquet" / f"{key}.arrow"
    with locked(path):
        if not path.is_file():
            with replacing(path) as temporary:
                _copy(files, column, temporary)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(0)


def _copy(files: tuple[Path, ...], column: str, out: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([pyarrow_parquet().read_schema(files[0]).field(column)])
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for file in files:
            table, largest, left = open_parquet(file)
            rows = min(max(COPIED_BYTES // max(largest, 1), 1), COPIED_ROWS)
            with reading(file, KIND):
                for batch in table.iter_batches(rows, columns=[column]):
                    left -= batch.nbytes
                    if left < 0:
                        raise UserError(f"{file} would unpack to far more bytes than it holds; it is not read")
                    writer.write_batch(batch.cast(schema))


def read_parquet(files: Sequence[Path], root: Path, config: DataConfig, class_names: ClassNames | None = None) -> Table:
    """Images of Parquet files, or the images that they name; class names are those in the files, unless given.

    Paths are relative to `root`.
    """
    require_file(files[0])
    with reading(files[0], KIND):
        schema = pyarrow_parquet().read_schema(files[0])
    image, label = (schema.names[column] for column in named_columns(schema.names, config, files[0], IMAGE_COLUMNS))

    def where(row: int) -> str:
        return f"{files[0].parent}, row {row}"

    values = _cells(files, label)
    if len(values) == 0:
        raise UserError(f"{files[0]} has no rows")
    with reading(files[0], KIND):
        class_names = class_names or hub_class_names(schema, label)
    if values.dtype.kind in "iu":
        labels, names = labels_of_numbers(values, class_names, where)
    elif all(isinstance(value, str) for value in values):
        labels, names = labels_of_names(values.tolist(), class_names, where)
    else:
        raise UserError(f"{files[0]} has labels that are neither whole numbers nor names, or some are missing")
    images: DecodedImages
    if _is_text(schema.field(image).type):
        paths = _words(files, image, where, "path")
        images = FileImages.of(paths, labels, names, root, config.skip_broken)
    else:
        images = ParquetImages(
            labels=torch.from_numpy(labels),
            class_names=names,
            skip_broken=config.skip_broken,
            files=tuple(files),
            column=image,
            lines=np.arange(len(values)),
        )
    if SPLIT_COLUMN not in schema.names:
        return Table(images, (image, label))
    return Table(images, (image, label), splits_of(_words(files, SPLIT_COLUMN, where, "split"), where))


def paths_in_parquet(file: Path) -> list[str]:
    """The paths in a Parquet file of images, with or without labels."""
    with reading(file, KIND):
        schema = pyarrow_parquet().read_schema(file)
        texts = [name for name in schema.names if _is_text(schema.field(name).type)]
    named = [name for usual in PATH_COLUMNS for name in texts if name.lower() == usual]
    if not named and len(texts) != 1:
        raise UserError(f"{file} has no column 'path' of paths (columns: {', '.join(schema.names)[:200]})")
    return _words([file], (named or texts)[0], lambda row: f"{file}, row {row}", "path")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner))


def _words(files: Sequence[Path], column: str, where: Where, what: str) -> list[str]:
    """A column whose cells must all be text."""
    values = _cells(files, column)
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value or "\0" in value:
            raise UserError(f"{where(row)}: expected a {what}, found {str(value)[:80]!r}")
    return [str(value) for value in values]


def _cells(files: Sequence[Path], column: str) -> np.ndarray:
    """A column of all files, (N,): numbers, or names; each different name is stored once."""
    arrays = []
    for file in files:
        open_parquet(file)
        with reading(file, KIND):
            table = pyarrow_parquet().read_table(file, columns=[column], read_dictionary=[column])
            for chunk in table.column(0).chunks:
                if hasattr(chunk, "dictionary"):
                    words = np.array([*chunk.dictionary.to_pylist(), None], object)
                    arrays.append(words[chunk.indices.fill_null(len(words) - 1).to_numpy()])
                else:
                    arrays.append(chunk.to_numpy(zero_copy_only=False))
    with reading(files[0], KIND):
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def read_parquet_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The files that were given, or train-*.parquet, … in the root folder; or one table with a column `split`."""
    train = expanded(config.train_list) if config.train_list else None
    folder = root if train is None else train.parent if _split_named(train) == "train" else None
    files = _files_by_split(folder) if folder else {}
    for split, given in zip(SPLITS, (config.train_list, config.validation_list, config.test_list), strict=True):
        if given:
            files[split] = (expanded(given),)
    if not files.get("train"):
        raise UserError(f"no training images in {root}; expected {root}/train-*.parquet, or give --train-list FILE")
    return read_splits(
        files,
        lambda of_split, class_names: read_parquet(of_split, root, config, class_names),
        lambda of_split: of_split[0].name + (f" and {len(of_split) - 1} more" if len(of_split) > 1 else ""),
    )


def _files_by_split(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Split → its files below a folder or its `data` folder: `train-00000-of-00002.parquet`, …

    Files that name no split are for training.
    """
    files = sorted([*folder.glob("*.parquet"), *(folder / "data").glob("*.parquet")])
    of_split: dict[str, tuple[Path, ...]] = {}
    for file in files:
        if split := _split_named(file):
            of_split[split] = (*of_split.get(split, ()), file)
    return of_split or {"train": tuple(files)}


def _split_named(file: Path) -> str | None:
    """The split that the first word of a file's name means."""
    return split_of(re.split(r"[-_.]", file.name, maxsplit=1)[0])


def hub_class_names(schema: Any, label: str) -> ClassNames | None:
    """The names that the `datasets` library writes beside a column of class labels."""
    details = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = details.get("info", {}).get("features", {})
    return tuple(map(str, features.get(label, {}).get("names") or ())) or None
