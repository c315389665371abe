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
from longtail.data.csv_files import splits_by_column
from longtail.data.images import DecodedImages, FileImages, as_paths, file_state, regular_file
from longtail.data.splits import ReadSplits
from longtail.data.tables import (
    PATH_COLUMNS,
    SPLIT_COLUMN,
    SPLITS,
    ColumnNames,
    Columns,
    Where,
    labels_of_names,
    labels_of_numbers,
    named_columns,
    split_of,
    splits_of,
)
from longtail.errors import UserError
from longtail.files.atomic import cache_folder, locked, replacing
from longtail.files.reading import MOST_RATIO, MOST_UNPACKED, expanded, reading, require_file

MAX_ROWS = 1 << 20  # and one more for each byte of the file: an image takes more
COPIED_ROWS = 256  # at a time
COPIED_BYTES = 1 << 30  # at a time, if every row refers to one value that is as large as its row group
IMAGE_COLUMNS = ("image", "img", "picture", "images", *PATH_COLUMNS)
KIND = "a whole Parquet file"


def max_unpacked_bytes(file: Path) -> int:
    """What a file may unpack to: images and words compress little."""
    return MOST_UNPACKED + MOST_RATIO * require_file(file)


def require_plausible(metadata: Any, file: Path) -> int:
    """Refuse a file that states more rows or bytes than it can hold; returns the bytes of its largest row group."""
    if metadata.num_rows > MAX_ROWS + require_file(file):
        raise UserError(f"{file} would unpack to {metadata.num_rows:,} rows, far more than it holds; it is not read")
    sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    if sum(sizes) > max_unpacked_bytes(file):
        raise UserError(f"{file} would unpack to {sum(sizes):,} bytes, far more than it holds; it is not read")
    return max(sizes, default=0)


@dataclass(frozen=True, kw_only=True)
class ParquetImages(DecodedImages):
    """Images in a column of Parquet files.

    Args:
        files: in this order.
        column: name of the column with the images.
        lines: row of each image, counted over all files.
    """

    files: tuple[Path, ...]
    column: str
    lines: np.ndarray = field(repr=False)
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
        sizes = [(file.name, file.stat().st_size) for file in self.files]
        return json.dumps([sizes, self.column]).encode() + self.lines.astype(np.int64).tobytes()

    def state(self) -> bytes:
        states = [file_state(file) for file in self.files]
        return json.dumps([states, self.column]).encode() + self.lines.astype(np.int64).tobytes()

    def source(self, index: int) -> Path | BytesIO:
        cell = _copied(self.files, self.column)[int(self.lines[index])].as_py()
        content, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if content is None and name:
            return regular_file(self.path(index).parent.parent / str(name))
        return BytesIO(content or b"")


def pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("Parquet files need pyarrow: pip install 'longtail[parquet]'") from error
    return parquet


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

    parquet = pyarrow_parquet()
    schema = pa.schema([parquet.read_schema(files[0]).field(column)])
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for file in files:
            with reading(file, KIND):
                table = parquet.ParquetFile(file)
                largest = require_plausible(table.metadata, file)
                rows, left = min(max(COPIED_BYTES // max(largest, 1), 1), COPIED_ROWS), max_unpacked_bytes(file)
                for batch in table.iter_batches(rows, columns=[column]):
                    left -= batch.nbytes
                    if left < 0:
                        raise UserError(f"{file} would unpack to far more bytes than it holds; it is not read")
                    writer.write_batch(batch.cast(schema))


def parquet_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Split → its files below a folder or its `data` folder: `train-00000-of-00002.parquet`, …

    Files that name no split are for training.
    """
    files = sorted([*folder.glob("*.parquet"), *(folder / "data").glob("*.parquet")])
    of_split: dict[str, tuple[Path, ...]] = {}
    for file in files:
        if split := _split_named(file):
            of_split[split] = (*of_split.get(split, ()), file)
    return of_split or {"train": tuple(files)}


def read_parquet(
    files: Sequence[Path],
    *,
    root: Path | None = None,
    class_names: tuple[str, ...] | None = None,
    columns: ColumnNames | None = None,
    skip_broken: bool = False,
) -> DecodedImages:
    """Images of Parquet files, or the images that they name; class names are those in the files, unless given.

    Paths are relative to `root` (default: the folder of the first file).
    """
    return _read(files, root, class_names, columns or ColumnNames(), skip_broken)[0]


def _read(
    files: Sequence[Path], root: Path | None, class_names: tuple[str, ...] | None, given: ColumnNames, skip_broken: bool
) -> tuple[DecodedImages, Columns, np.ndarray | None]:
    """The images, the columns that hold them, and the split of each row where a column names it, (N,)."""
    columns = [_columns(file, given) for file in files]
    image, label = columns[0].names or ("", "")

    def where(row: int) -> str:
        return f"{files[0].parent}, row {row}"

    values = _cells(files, [of_file.names[1] for of_file in columns if of_file.names])
    if len(values) == 0:
        raise UserError(f"{files[0]} has no rows")
    with reading(files[0], KIND):
        schema = pyarrow_parquet().read_schema(files[0])
        class_names = class_names or hub_class_names(schema, label)
    if values.dtype.kind in "iu":
        labels, names = labels_of_numbers(values, class_names, where)
    elif all(isinstance(value, str) for value in values):
        labels, names = labels_of_names(values.tolist(), class_names, where)
    else:
        raise UserError(f"{files[0]} has labels that are neither whole numbers nor names, or some are missing")
    common: dict[str, Any] = {"labels": torch.from_numpy(labels), "class_names": names, "skip_broken": skip_broken}
    images: DecodedImages
    if _is_text(schema.field(image).type):
        paths = _words(_cells(files, [image] * len(files)), where, "path")
        images = FileImages(**common, root=root or files[0].parent, paths=as_paths(paths))
    else:
        images = ParquetImages(**common, files=tuple(files), column=image, lines=np.arange(len(values)))
    if SPLIT_COLUMN not in schema.names:
        return images, columns[0], None
    splits = _words(_cells(files, [SPLIT_COLUMN] * len(files)), where, "split")
    return images, columns[0], splits_of(splits, where)


def paths_of_parquet(file: Path) -> list[str]:
    """The paths in a Parquet file of images, with or without labels."""
    with reading(file, KIND):
        schema = pyarrow_parquet().read_schema(file)
        texts = [name for name in schema.names if _is_text(schema.field(name).type)]
    named = [name for usual in PATH_COLUMNS for name in texts if name.lower() == usual]
    if not named and len(texts) != 1:
        raise UserError(f"{file} has no column 'path' of paths (columns: {', '.join(schema.names)[:200]})")
    column = named[0] if named else texts[0]
    return _words(_cells([file], [column]), lambda row: f"{file}, row {row}", "path")


def _columns(file: Path, given: ColumnNames) -> Columns:
    require_file(file)
    with reading(file, KIND):
        return named_columns(pyarrow_parquet().read_schema(file).names, given, file, IMAGE_COLUMNS)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner))


def _words(values: np.ndarray, where: Where, what: str) -> list[str]:
    """Cells that must all be text."""
    for row, value in enumerate(values):
        if not isinstance(value, str) or not value or "\0" in value:
            raise UserError(f"{where(row)}: expected a {what}, found {str(value)[:80]!r}")
    return [str(value) for value in values]


def _cells(files: Sequence[Path], columns: Sequence[str]) -> np.ndarray:
    """One column of each file, (N,): numbers, or names; each different name is stored once."""
    arrays = []
    for file, column in zip(files, columns, strict=True):
        with reading(file, KIND):
            parquet = pyarrow_parquet()
            require_plausible(parquet.ParquetFile(file).metadata, file)
            table = parquet.read_table(file, columns=[column], read_dictionary=[column])
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
    files = parquet_files(root) if not config.train_list else {}
    if config.train_list and _split_named(expanded(config.train_list)) == "train":
        files = parquet_files(expanded(config.train_list).parent)
    for name, given in zip(SPLITS, (config.train_list, config.validation_list, config.test_list), strict=True):
        if given:
            files[name] = (expanded(given),)
    if not files.get("train"):
        raise UserError(f"no training images in {root}; expected {root}/train-*.parquet, or give --train-list FILE")
    column_names = ColumnNames(config.path_column, config.label_column)
    train, columns, split = _read(files["train"], root, None, column_names, config.skip_broken)
    if split is not None and (split != "train").any():
        others = [of_split[0] for name, of_split in files.items() if name != "train"]
        return splits_by_column(train, split, _called(files["train"]), columns, others)
    held_out = {
        name: _read(of_split, root, train.class_names, column_names, config.skip_broken)[0]
        for name, of_split in files.items()
        if name != "train"
    }
    names_on_disk = {name: _called(of_split) for name, of_split in files.items()}
    names_on_disk["train"] = columns.describe(names_on_disk["train"])
    return ReadSplits(train, held_out.get("validation"), held_out.get("test"), names_on_disk)


def _split_named(file: Path) -> str | None:
    """The split that the first word of a file's name means."""
    return split_of(re.split(r"[-_.]", file.name, maxsplit=1)[0])


def _called(files: Sequence[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def hub_class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names that the `datasets` library writes beside a column of class labels."""
    details = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = details.get("info", {}).get("features", {})
    return tuple(map(str, features.get(label, {}).get("names") or ())) or None
