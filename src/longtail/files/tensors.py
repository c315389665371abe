"""Tensors in safetensors files, read and written by the library `safetensors`; large arrays are memory-mapped.

A file holds the metadata of its writer as JSON under "longtail", and in it one digest (xxh3, 128 bits) of the whole
file. The digest detects damage; it does not protect against forgery. Files without it are read unchecked.

Also conversions between torch and NumPy, and computing in at least single precision.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from longtail.errors import UserError
from longtail.files.atomic import NO_SPACE, replacing, write_bytes
from longtail.files.reading import reading, require_file

KIND = "a whole safetensors file"
CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
# Types of safetensors → NumPy's; bfloat16 is read as whole numbers.
TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}
TYPES |= {"BOOL": "b1", "BF16": "u2"}
# Changes of a private mapping stay in memory. No memory is reserved for them: a file may be larger than all of it.
PRIVATE: dict[str, Any] = {"access": mmap.ACCESS_COPY}
if sys.platform == "linux":
    MAP_NORESERVE = 0x4000
    PRIVATE = {"flags": mmap.MAP_PRIVATE | MAP_NORESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
DIGEST = "xxh3_128"
NO_DIGEST = "0" * 32
# The digest follows these bytes in the header: it is in JSON text that is a string of JSON text.
DIGEST_MARK = f'\\"{DIGEST}\\": \\"'.encode()


def read_details(path: Path, *, check: bool = False) -> dict[str, Any]:
    """The metadata of the writer, with the digest if there is one; with `check`, raises if it does not match."""
    require_file(path)
    with reading(path, KIND):
        with safe_open(path, "np") as file:  # the library checks lengths, shapes and offsets against the size
            details = json.loads((file.metadata() or {}).get("longtail", "{}"))
        if not isinstance(details, dict):
            raise ValueError("its metadata is not a JSON object")
        if check and DIGEST in details and _digest(np.memmap(path, np.uint8, "r"))[1] != details[DIGEST]:
            raise UserError(f"{path} is damaged: its content is not what was written; delete it and make it again")
        return details


def write_tensors(path: Path, tensors: dict[str, Tensor], details: dict[str, Any]) -> None:
    """Tensors and metadata as one file, written atomically."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = bytearray(save(copies, {"longtail": json.dumps({**details, DIGEST: NO_DIGEST})}))
    where, digest = _digest(np.frombuffer(content, np.uint8))
    content[where] = digest.encode()
    write_bytes(path, content)


def read_tensors(path: Path, *, check: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, memory-mapped, and its metadata; with `check`, raises if the digest does not match.

    Changes stay in memory and never reach the file.
    """
    details = read_details(path, check=check)
    details.pop(DIGEST, None)
    with reading(path, KIND):
        return load_file(path), details


def read(path: Path, *, check: bool = True) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The same as arrays, of a file that may be larger than memory; bfloat16, which NumPy lacks, becomes float32."""
    details = read_details(path, check=check)
    details.pop(DIGEST, None)
    arrays = {}
    with reading(path, KIND), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, **PRIVATE), np.uint8)[8 + length :]
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in TYPES:
            raise UserError(f"{path}: {name} is of type {entry['dtype']}; save it as one of {', '.join(TYPES)}")
        array = data[slice(*entry["data_offsets"])].view(TYPES[entry["dtype"]]).reshape(entry["shape"])
        # The bytes of bfloat16 are the upper half of a float32.
        arrays[name] = (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array
    return arrays, details


@contextmanager
def create(
    path: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype]], details: dict[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """A new file of arrays with these shapes, mapped for writing; it appears if the block succeeds."""
    entries, size, codes = {}, 0, {kind: code for code, kind in TYPES.items()}
    # The widest types first, so that every array is aligned.
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):
        stop = size + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": codes[dtype.str[1:]], "shape": list(shape), "data_offsets": [size, stop]}
        size = stop
    metadata = {"longtail": json.dumps({**details, DIGEST: NO_DIGEST})}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            _reserve(file, 8 + len(text) + size)
            file.write(struct.pack("<Q", len(text)) + text)
        content = np.memmap(temporary, np.uint8, "r+")
        data = content[8 + len(text) :]
        yield {
            name: data[slice(*entries[name]["data_offsets"])].view(dtype).reshape(shape)
            for name, (shape, dtype) in shapes.items()
        }
        where, digest = _digest(content)
        content[where] = np.frombuffer(digest.encode(), np.uint8)
        content.flush()


def _reserve(file: IO[bytes], size: int) -> None:
    """Reserve the space of a file before it is mapped: on a full disk, a write to a mapped file kills the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise OSError(error.errno, f"{os.strerror(error.errno)} ({size:,} bytes are needed)") from error
        if error.errno not in CANNOT_RESERVE:
            raise
    file.truncate(size)


def _digest(content: np.ndarray) -> tuple[slice, str]:
    """The bytes of a file that hold its digest, and the digest of the file before it was written there."""
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    start = 8 + content[8 : 8 + length].tobytes().index(DIGEST_MARK) + len(DIGEST_MARK)
    stop = start + len(NO_DIGEST)
    digest = xxhash.xxh3_128(content[:start].data)
    digest.update(NO_DIGEST.encode())
    digest.update(content[stop:].data)
    return slice(start, stop), digest.hexdigest()


def single_at_least(values: Tensor) -> Tensor:
    """Half precision is converted to single; single and double are not changed."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def as_array(values: Any) -> np.ndarray:
    """Tensors and lists as arrays; arrays, also memory-mapped ones, are returned unchanged."""
    if not isinstance(values, Tensor):
        return np.asanyarray(values)
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


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
