"""Tensors in safetensors files, read and written by the library `safetensors`; large arrays are memory-mapped.

A file holds the metadata of its writer as JSON under "longtail", and in it one digest (xxh3, 128 bits) of the whole
file. The digest detects damage; it does not protect against forgery. Files without it are read unchecked.

Also conversions between torch and NumPy, and computing in at least single precision.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from longtail.errors import UserError
from longtail.files.atomic import replacing, reserve, write_bytes
from longtail.files.reading import reading, require_file

KIND = "a whole safetensors file"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DIGEST = "xxh3_128"
NO_DIGEST = "0" * 32
# The digest follows these bytes in the header: it is in JSON text that is a string of JSON text.
DIGEST_MARK = f'\\"{DIGEST}\\": \\"'.encode()


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Args:
        entries: dtype, shape and data_offsets of each tensor.
        details: metadata of the writer.
        digest: digest of the file, if it has one.
        start: position of the first tensor.
    """

    entries: dict[str, dict[str, Any]]
    details: dict[str, Any]
    digest: str | None
    start: int


def _read_header(path: Path) -> Header:
    require_file(path)
    with reading(path, KIND):
        with safe_open(path, "np"):
            pass  # the library checks lengths, shapes and offsets against the size of the file
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
        details = json.loads(entries.pop("__metadata__", {}).get("longtail", "{}"))
        if not isinstance(details, dict):
            raise ValueError("its metadata is not a JSON object")
        details.pop("digests", None)  # one per chunk, in files of earlier versions
        return Header(entries, details, details.pop(DIGEST, None), 8 + length)


def read_header(path: Path) -> dict[str, Any]:
    """The metadata alone."""
    return _read_header(path).details


def has_digest(path: Path) -> bool:
    """Whether a file holds a digest of its content."""
    return _read_header(path).digest is not None


def write_tensors(path: Path, tensors: dict[str, Tensor], details: dict[str, Any]) -> None:
    """Tensors and metadata as one file, written atomically."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = bytearray(save(copies, _metadata(details)))
    _write_digest(np.frombuffer(content, np.uint8))
    write_bytes(path, content)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors and the metadata; raises if the digest does not match."""
    header = _read_header(path)
    _check_digest(path, header)
    with reading(path, KIND):
        return load_file(path), header.details


def read(path: Path, *, check: bool = True) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file, memory-mapped, and its metadata; with `check`, raises if the digest does not match.

    Changes to the arrays stay in memory and never reach the file.
    """
    header = _read_header(path)
    if check:
        _check_digest(path, header)
    arrays = {}
    for name, entry in header.entries.items():
        kind = entry["dtype"]
        if kind not in DTYPES and kind != "BF16":
            raise UserError(f"{path}: {name} is of type {kind}; save it as one of {', '.join(DTYPES)}")
        with reading(path, KIND):
            arrays[name] = _map(path, entry, header.start, "c")
        if kind == "BF16":  # NumPy has no bfloat16; its bytes are the upper half of a float32
            arrays[name] = (arrays[name].astype(np.uint32) << 16).view(np.float32)
    return arrays, header.details


@contextmanager
def create(
    path: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype]], details: dict[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """A new file of arrays with these shapes, mapped for writing; it appears if the block succeeds."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, size = {}, 0
    # The widest types first, so that every array is aligned.
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -np.dtype(item[1][1]).itemsize):
        stop = size + math.prod(shape) * np.dtype(dtype).itemsize
        entries[name] = {"dtype": names[np.dtype(dtype)], "shape": list(shape), "data_offsets": [size, stop]}
        size = stop
    text = json.dumps({"__metadata__": _metadata(details), **entries}).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            reserve(file, 8 + len(text) + size, path)
            file.write(struct.pack("<Q", len(text)) + text)
        arrays = {name: _map(temporary, entries[name], 8 + len(text), "r+") for name in shapes}
        yield arrays
        _flush(*arrays.values())
        _write_digest(np.memmap(temporary, np.uint8, "r+"))


def _metadata(details: dict[str, Any]) -> dict[str, str]:
    return {"longtail": json.dumps({**details, DIGEST: NO_DIGEST})}


def _map(path: Path, entry: dict[str, Any], start: int, mode: Any) -> np.ndarray:
    dtype, shape = DTYPES.get(entry["dtype"], np.dtype(np.uint16)), tuple(entry["shape"])
    if math.prod(shape) == 0:  # an empty array cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, mode, start + entry["data_offsets"][0], shape)


def _flush(*arrays: np.ndarray) -> None:
    for array in arrays:
        if isinstance(array, np.memmap):
            array.flush()


def _digest_slice(content: np.ndarray) -> slice:
    """The bytes of the file that hold the digest."""
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    begin = 8 + content[8 : 8 + length].tobytes().index(DIGEST_MARK) + len(DIGEST_MARK)
    return slice(begin, begin + len(NO_DIGEST))


def _digest(content: np.ndarray, where: slice) -> str:
    """The digest of a file as it was before its digest was written."""
    digest = xxhash.xxh3_128(content[: where.start].data)
    digest.update(NO_DIGEST.encode())
    digest.update(content[where.stop :].data)
    return digest.hexdigest()


def _write_digest(content: np.ndarray) -> None:
    where = _digest_slice(content)
    content[where] = np.frombuffer(_digest(content, where).encode(), np.uint8)
    _flush(content)


def _check_digest(path: Path, header: Header) -> None:
    if header.digest is None:
        return
    with reading(path, KIND):
        content = np.memmap(path, np.uint8, "r")
        matches = _digest(content, _digest_slice(content)) == header.digest
    if not matches:
        raise UserError(f"{path} is damaged: its content is not what was written; delete the file and make it again")


def single_at_least(values: Tensor) -> Tensor:
    """Half precision is converted to single; single and double are not changed."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def plain(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, detached, in a type that NumPy supports."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def as_array(values: Any) -> np.ndarray:
    """Tensors and lists as arrays; arrays, also memory-mapped ones, are returned unchanged."""
    if isinstance(values, np.ndarray):
        return values
    return plain(values).numpy() if isinstance(values, Tensor) else np.asarray(values)


def writable(values: np.ndarray | Tensor) -> Tensor:
    """A tensor that shares the memory of an array, or a copy if the array is read-only."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=("C", "W")))


def without_autocast(values: Tensor) -> AbstractContextManager[object]:
    """A block in which the device of `values` computes in the precision of its inputs."""
    kind = values.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """A block that restores the random states of torch, NumPy and Python at its end."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    of_devices = torch.cuda.get_rng_state_all() if in_use else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)
