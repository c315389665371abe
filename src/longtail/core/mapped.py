"""Safetensors files whose arrays are memory-mapped, for reading and for writing row by row."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.files import replacing
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


@contextmanager
def create(
    path: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype]], details: dict[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """A new safetensors file of known shapes, mapped for writing; it appears when the block succeeds."""
    entries: dict[str, Any] = {"__metadata__": {"longtail": json.dumps(details)}}
    position = 0
    for name, (shape, dtype) in shapes.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        offsets = [position, position + size]
        entries[name] = {"dtype": NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": offsets}
        position += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + position)
        arrays = _map(temporary, entries, 8 + len(text), "r+")
        yield arrays
        for array in arrays.values():
            if isinstance(array, np.memmap):
                array.flush()


def read(path: Path, *, writable: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a safetensors file, mapped, and its header.

    Unless `writable`, changes to the arrays stay in memory and never reach the file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 100_000_000:
                raise ValueError("its header is too long")
            entries = json.loads(file.read(length))
        details = json.loads(entries.get("__metadata__", {}).get("longtail", "{}"))
        return _map(path, entries, 8 + length, "r+" if writable else "c"), details
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error


def _map(path: Path, entries: dict[str, Any], start: int, mode: Any) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        kind = entry["dtype"]
        if kind not in TYPES and kind != "BF16":
            raise UserError(f"{path}: {name} is of type {kind}; save it as one of {', '.join(TYPES)}")
        shape, dtype = tuple(entry["shape"]), TYPES.get(kind, np.dtype(np.uint16))
        # An empty array cannot be mapped.
        empty = 0 in shape
        offset = start + entry["data_offsets"][0]
        array = np.empty(shape, dtype) if empty else np.memmap(path, dtype, mode, offset, shape)
        # numpy does not know bfloat16: the upper half of a float32.
        arrays[name] = (array.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else array
    return arrays
