"""Image sets in Parquet files, as the Hugging Face hub keeps them: compressed images and labels in columns.

All labels are read first, images when they are needed. A row group of such a file holds a hundred
images or more, and reading one image would read the whole group. Therefore, on first use,
the compressed images are copied into an Arrow file in the cache folder, which the operating system
maps into memory.
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

from longtail.config import DataConfig
from longtail.core.files import cache_folder, replacing
from longtail.core.locks import locked
from longtail.core.reading import MOST_RATIO, MOST_UNPACKED, reading, require_file
from longtail.data.file_names import SPLITS, split_of
from longtail.data.images import DecodedImages, file_state
from longtail.data.labels import from_names, from_numbers
from longtail.data.splits import ReadSplits
from longtail.errors import UserError

IMAGE_NAMES = ("image", "img", "picture", "images")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
COPIED_ROWS = 256
MOST_ROWS = 1 << 20  # and one for each byte of the file: an image takes more
KIND = "a whole Parquet file"


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
            count = _parquet().ParquetFile(file).metadata.num_rows
            if row < count:
                return file / f"row {row}"
            row -= count
        raise IndexError(index)

    def _samples(self) -> bytes:
        known = [(file.name, file.stat().st_size) for file in self.files]
        return json.dumps([known, self.column]).encode() + self.lines.astype(np.int64).tobytes()

    def state(self) -> bytes:
        known = [file_state(file) for file in self.files]
        return json.dumps([known, self.column]).encode() + self.lines.astype(np.int64).tobytes()

    def source(self, index: int) -> Path | BytesIO:
        cell = _copied(self.files, self.column)[int(self.lines[index])].as_py()
        content, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if content is None and name:
            return self.path(index).parent.parent / str(name)
        return BytesIO(content or b"")


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("Parquet files need pyarrow: pip install 'longtail[parquet]'") from error
    return parquet


def parquet_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Split → its files below a folder or its `data` folder: `train-00000-of-00002.parquet`, …

    Files that name no split are for training.
    """
    found = sorted([*folder.glob("*.parquet"), *(folder / "data").glob("*.parquet")])
    of_split: dict[str, tuple[Path, ...]] = {}
    for file in found:
        if split := split_of(re.split(r"[-_.]", file.name, maxsplit=1)[0]):
            of_split[split] = (*of_split.get(split, ()), file)
    return of_split or {"train": tuple(found)}


def read_parquet(
    files: Sequence[Path], *, class_names: tuple[str, ...] | None = None, skip_broken: bool = False
) -> ParquetImages:
    """Images of Parquet files; class names are those the files know, unless given."""
    tables, image_column = [], ""
    for file in files:
        if not file.is_file():
            raise UserError(f"Parquet file {file} does not exist")
        parquet = _parquet()
        require_file(file)
        with reading(file, KIND):
            schema = parquet.read_schema(file)
            image_column = _column(schema, IMAGE_NAMES, file)
            tables.append(_labels(file, _column(schema, LABEL_NAMES, file)))
    with reading(files[0], KIND):
        values = np.concatenate(tables)
    if len(values) == 0:
        raise UserError(f"{files[0]} has no rows")

    def where(place: int) -> str:
        return f"{files[0].parent}, row {place}"

    with reading(files[0], KIND):
        known = class_names or _named_classes(_parquet().read_schema(files[0]))
    if values.dtype.kind in "iu":
        labels, names = from_numbers(values, known, where)
    elif all(isinstance(value, str) for value in values):
        labels, names = from_names(values.tolist(), known, where)
    else:
        raise UserError(f"{files[0]} has labels that are neither whole numbers nor names, or some are missing")
    return ParquetImages(
        labels=labels,
        class_names=names,
        skip_broken=skip_broken,
        files=tuple(files),
        column=image_column,
        lines=np.arange(len(values)),
    )


def _labels(file: Path, column: str) -> np.ndarray:
    """The labels of one file, (N,): numbers, or names; each different name is stored once."""
    parquet = _parquet()
    _require_plausible(parquet.ParquetFile(file).metadata, file)
    found = parquet.read_table(file, columns=[column], read_dictionary=[column]).column(0)
    parts = []
    for chunk in found.chunks:
        if hasattr(chunk, "dictionary"):
            words = np.array([*chunk.dictionary.to_pylist(), None], object)
            parts.append(words[chunk.indices.fill_null(len(words) - 1).to_numpy()])
        else:
            parts.append(chunk.to_numpy(zero_copy_only=False))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _require_plausible(metadata: Any, file: Path) -> None:
    """Refuse a file that unpacks to far more bytes than it has, before memory is allocated."""
    size = require_file(file)
    unpacked = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if metadata.num_rows > MOST_ROWS + size or unpacked > MOST_UNPACKED + MOST_RATIO * size:
        raise UserError(f"{file} would unpack to {metadata.num_rows:,} rows, far more than it holds; it is not read")


def read_parquet_splits(config: DataConfig, root: Path) -> ReadSplits:
    """The files that were given, or train-*.parquet, validation-*.parquet and test-*.parquet in the root folder."""
    files = parquet_files(root)
    for name, given in zip(SPLITS, (config.train_list, config.validation_list, config.test_list), strict=True):
        if given:
            files[name] = (Path(given).expanduser(),)
    if not files.get("train"):
        raise UserError(f"no training images in {root}; expected {root}/train-*.parquet, or give --train-list FILE")
    train = read_parquet(files["train"], skip_broken=config.skip_broken)
    held_out = {
        name: read_parquet(of_split, class_names=train.class_names, skip_broken=config.skip_broken)
        for name, of_split in files.items()
        if name != "train"
    }
    places = {name: _called(of_split) for name, of_split in files.items()}
    return ReadSplits(train, held_out.get("validation"), held_out.get("test"), places)


def _called(files: Sequence[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _column(schema: Any, names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in schema.names:
            return name
    paths = " (a list of paths is read from a CSV file)" if names is IMAGE_NAMES else ""
    raise UserError(f"{file} has no column {names[0]!r}{paths}; its columns: {', '.join(schema.names)}")


def _named_classes(schema: Any) -> tuple[str, ...] | None:
    """The names that the `datasets` library writes beside a column of class labels."""
    details = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = details.get("info", {}).get("features", {})
    for name in LABEL_NAMES:
        if name in schema.names:
            return tuple(map(str, features.get(name, {}).get("names") or ())) or None
    return None


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

    parquet = _parquet()
    schema = pa.schema([parquet.read_schema(files[0]).field(column)])
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for file in files:
            for batch in parquet.ParquetFile(file).iter_batches(COPIED_ROWS, columns=[column]):
                writer.write_batch(batch.cast(schema))
