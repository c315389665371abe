"""Safetensors files with memory-mapped arrays, to read and to write row by row.

A chunk of a mapped array is compared with its digest when it is first read. So a file larger than memory opens at
once, and bytes that were damaged on disk are never used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from longtail.core.files import replacing, reserve, writing
from longtail.core.layout import Digests, Entry, Layout, chunk_digests, digest, opened
from longtail.errors import UserError

NAMES: dict[np.dtype, str] = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
TYPES: dict[str, np.dtype] = {name: dtype for dtype, name in NAMES.items()}


class MappedArray(NDArrayOperatorsMixin):
    """An array in a file, read when it is indexed; each chunk is compared with its digest before it is used.

    NumPy functions accept it; `array[:]` is a NumPy array of the whole content.
    """

    def __init__(self, path: Path, name: str, content: np.ndarray, array: np.ndarray, digests: Digests) -> None:
        self.path = path
        self.name = name
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self._content, self._array, self._digests = content, array, digests
        self._seen = np.zeros(-(-len(content) // digests.chunk), bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"MappedArray({self.name} of {self.path}, shape {self.shape}, {self.dtype})"

    def __getitem__(self, key: Any) -> np.ndarray:
        self._check(self._chunks_of(key))
        return self._array[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._check(range(len(self._seen)))
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **more: Any) -> Any:
        plain = (np.asarray(item) if isinstance(item, MappedArray) else item for item in inputs)
        return getattr(function, method)(*plain, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)  # all other attributes of an array

    def _chunks_of(self, key: Any) -> Iterable[int]:
        """The chunks that contain the rows of an index; all chunks if the index is not a slice or row numbers."""
        size, width = self._digests.chunk, len(self._content) // max(len(self), 1)
        key = key[0] if isinstance(key, tuple) and key else key
        if isinstance(key, slice) and key.step in (None, 1):
            first, last, _ = key.indices(len(self))
            return range(first * width // size, -(-last * width // size) if last > first else 0)
        if isinstance(key, np.ndarray) and key.ndim == 1 and key.dtype.kind in "iu" and 0 < width <= size:
            rows = np.where(key < 0, key + len(self), key)
            ends = np.concatenate([rows * width // size, ((rows + 1) * width - 1) // size])
            return (int(number) for number in np.unique(ends) if number < len(self._seen))
        return range(len(self._seen))

    def _check(self, chunks: Iterable[int]) -> None:
        for number in chunks:
            if not self._seen[number]:
                check(self._content, self.path, self.name, self._digests, number)
                self._seen[number] = True


def check(content: np.ndarray, path: Path, name: str, digests: Digests, number: int) -> None:
    """Compare one chunk of an array's bytes with its digest."""
    start = number * digests.chunk
    if digest(content[start : start + digests.chunk]) != digests.of_chunk(name, number):
        raise UserError(
            f"{path} is damaged: {name} is not what was written (near byte {start:,} of it); delete the file and "
            "make it again"
        )


@contextmanager
def create(
    path: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype]], details: dict[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """A new safetensors file with known shapes, mapped for writing; the file appears if the block succeeds."""
    described = {name: (NAMES[np.dtype(dtype)], tuple(shape)) for name, (shape, dtype) in shapes.items()}
    layout = Layout.of(described, details)
    header = layout.encode()
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            reserve(file, len(header) + layout.size, path)
            file.write(header)
        arrays = {
            name: _map(temporary, entry, len(header), "r+").view(TYPES[entry.kind]).reshape(entry.shape)
            for name, entry in layout.entries.items()
        }
        yield arrays
        _seal(temporary, layout, arrays)


def rewrite(path: Path, name: str, values: np.ndarray) -> None:
    """Replace one array of a file by values of the same shape and type; no other process may have the file open."""
    with opened(path) as (_, layout, start):
        assert layout.digests is not None
    with writing(path):
        content = _map(path, layout.entries[name], start, "r+")
        content[...] = _flat(values)
        known = {other: letters for other, letters in layout.digests.arrays.items() if other != name}
        _seal(path, layout, {name: content}, known)


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _seal(path: Path, layout: Layout, contents: dict[str, np.ndarray], known: dict[str, str] | None = None) -> None:
    """Write the digests of the arrays into the header."""
    assert layout.digests is not None
    chunk, found = layout.digests.chunk, dict(known or {})
    for name, content in contents.items():
        found[name] = chunk_digests(_flat(content), chunk)
        if isinstance(content, np.memmap):
            content.flush()
    ordered = {name: found[name] for name in layout.entries}
    with path.open("rb+") as file:
        file.write(layout.with_digests(ordered).encode())
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The memory-mapped arrays of a safetensors file, and the metadata of its writer.

    Changes to the arrays stay in memory and never reach the file.
    """
    arrays: dict[str, Any] = {}
    with opened(path) as (file, layout, start):
        for name, entry in layout.entries.items():
            if entry.kind not in TYPES and entry.kind != "BF16":
                raise UserError(f"{path}: {name} is of type {entry.kind}; save it as one of {', '.join(TYPES)}")
            content = _map(file, entry, start, "c")
            # NumPy has no bfloat16; its bytes are the upper half of a float32.
            array = content.view(TYPES.get(entry.kind, np.dtype(np.uint16))).reshape(entry.shape)
            mapped = MappedArray(path, name, content, array, layout.digests) if layout.digests else array
            arrays[name] = (
                (np.asarray(mapped).astype(np.uint32) << 16).view(np.float32) if entry.kind == "BF16" else mapped
            )
    return arrays, layout.details


def _map(path: Path | IO[bytes], entry: Entry, start: int, mode: Any) -> np.ndarray:
    """The bytes of one array."""
    size = entry.stop - entry.start
    if size == 0:  # an empty array cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode, start + entry.start, (size,))
