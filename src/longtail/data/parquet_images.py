"""Images in a column of Parquet files, as the Hugging Face hub keeps them.

A row group of such a file holds a hundred images or more, and reading one image would read the whole group.
Therefore, on first use, the compressed images are copied into an Arrow file in the cache folder, which the
operating system maps into memory.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longtail.core.files import cache_folder, replacing
from longtail.core.locks import locked
from longtail.core.reading import reading
from longtail.data.images import DecodedImages, file_state, regular_file
from longtail.data.parquet_pages import most_bytes, require_plausible
from longtail.errors import UserError

COPIED_ROWS = 256  # at a time
COPIED_BYTES = 1 << 28  # if each of these rows were as large as the dictionary that they refer to


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
            with reading(file, "a whole Parquet file"):
                found = parquet.ParquetFile(file)
                dictionary = require_plausible(found.metadata, file, column)
                rows, left = min(max(COPIED_BYTES // max(dictionary, 1), 1), COPIED_ROWS), most_bytes(file)
                for batch in found.iter_batches(rows, columns=[column]):
                    left -= batch.nbytes
                    if left < 0:
                        raise UserError(f"{file} would unpack to far more bytes than it holds; it is not read")
                    writer.write_batch(batch.cast(schema))
