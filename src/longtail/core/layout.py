"""The header of a safetensors file: written, read, and checked before it is used.

    8 bytes: length of the header; the header, JSON; the bytes of all arrays, one after another, without gaps

The library's own metadata is in the header under "longtail", together with digests of the content:
one for every `chunk` bytes of each array, and one of the header itself.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from longtail.core.reading import reading, require_file
from longtail.errors import UserError

KIND = "a whole safetensors file"
MOST_HEADER = 1 << 24  # bytes
SMALLEST_CHUNK = 1 << 20  # bytes under one digest
MOST_CHUNKS = 1 << 15  # bytes of one array: with more, its digests would not fit into the header
DIGEST_LETTERS = 16
SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
}


@dataclass(frozen=True)
class Entry:
    """One array: its type, its shape, and the position of its bytes after the header."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Digests:
    """The digests of the content: for each array, one digest per `chunk` bytes."""

    chunk: int
    arrays: dict[str, str]
    header: str

    def of_chunk(self, name: str, number: int) -> str:
        return self.arrays[name][number * DIGEST_LETTERS : (number + 1) * DIGEST_LETTERS]


@dataclass(frozen=True)
class Layout:
    """The arrays of a file and the metadata of its writer."""

    entries: dict[str, Entry]
    details: dict[str, Any]
    digests: Digests | None = None

    @property
    def size(self) -> int:
        """Number of bytes after the header."""
        return max((entry.stop for entry in self.entries.values()), default=0)

    @classmethod
    def of(cls, arrays: dict[str, tuple[str, tuple[int, ...]]], details: dict[str, Any]) -> Layout:
        """A layout of arrays of these types and shapes, one after another; the digests are filled in later."""
        entries, position = {}, 0
        for name, (kind, shape) in arrays.items():
            stop = position + math.prod(shape) * SIZES[kind]
            entries[name] = Entry(kind, shape, position, stop)
            position = stop
        largest = max((entry.stop - entry.start for entry in entries.values()), default=0)
        chunk = SMALLEST_CHUNK * max(-(-largest // (SMALLEST_CHUNK * MOST_CHUNKS)), 1)
        empty = {name: "0" * DIGEST_LETTERS * _chunks(entry, chunk) for name, entry in entries.items()}
        return cls(entries, details, Digests(chunk, empty, "0" * DIGEST_LETTERS))

    def with_digests(self, arrays: dict[str, str]) -> Layout:
        """A copy with the digests of the arrays and of the header."""
        assert self.digests is not None
        filled = Digests(self.digests.chunk, arrays, "0" * DIGEST_LETTERS)
        own = digest(_described(self.entries, self.details, filled).encode())
        return Layout(self.entries, self.details, Digests(filled.chunk, arrays, own))

    def encode(self) -> bytes:
        """The header of the file; its length does not depend on the digests."""
        assert self.digests is not None
        said = {**self.details, "digests": vars(self.digests)}
        header: dict[str, Any] = {"__metadata__": {"longtail": json.dumps(said)}}
        for name, entry in self.entries.items():
            offsets = [entry.start, entry.stop]
            header[name] = {"dtype": entry.kind, "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def digest(content: Any) -> str:
    """The digest of some bytes. It detects damage; it does not protect against forgery."""
    return xxhash.xxh3_64_hexdigest(content)


def chunk_digests(content: Any, chunk: int) -> str:
    """The digests of some bytes, one after another."""
    return "".join(digest(content[start : start + chunk]) for start in range(0, len(content), chunk))


def _chunks(entry: Entry, chunk: int) -> int:
    return -(-(entry.stop - entry.start) // chunk)


def _described(entries: dict[str, Entry], details: dict[str, Any], digests: Digests) -> str:
    listed = [[name, entry.kind, entry.shape, entry.start, entry.stop] for name, entry in sorted(entries.items())]
    return json.dumps([listed, details, digests.chunk, digests.arrays], sort_keys=True)


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], Layout, int]]:
    """An open file, its checked header, and the position of its first array; errors in the block name the file."""
    require_file(path)
    with reading(path, KIND), path.open("rb") as file:
        yield file, *_read(file, path)


def _read(file: IO[bytes], path: Path) -> tuple[Layout, int]:
    size = os.fstat(file.fileno()).st_size
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MOST_HEADER or 8 + length > size:
        raise ValueError(f"its header should have {length:,} bytes")
    header = json.loads(file.read(length), object_pairs_hook=_without_repetition)
    metadata = header.pop("__metadata__", {})
    entries = {str(name): _entry(name, value) for name, value in header.items()}
    details = json.loads(metadata.get("longtail", "{}"))
    if not isinstance(details, dict):
        raise ValueError("its metadata is not a table of names and values")
    layout = Layout(entries, details, _digests(details.pop("digests", None), entries))
    _require_no_gaps(layout, size - 8 - length)
    if layout.digests and layout.digests != layout.with_digests(layout.digests.arrays).digests:
        raise UserError(f"{path} is damaged: its header is not what was written")
    return layout, 8 + length


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found


def _entry(name: str, value: dict[str, Any]) -> Entry:
    kind, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    if kind not in SIZES:
        raise ValueError(f"{name} is of an unknown type")
    if len(shape) > 16 or not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name} has an impossible shape or place")
    if stop - start != math.prod(shape) * SIZES[kind]:
        raise ValueError(f"{name} of shape {tuple(shape)} does not fit into its {stop - start:,} bytes")
    return Entry(kind, tuple(shape), start, stop)


def _digests(values: Any, entries: dict[str, Entry]) -> Digests | None:
    if values is None:
        return None
    chunk, arrays, header = values["chunk"], values["arrays"], values["header"]
    if type(chunk) is not int or chunk < SMALLEST_CHUNK or arrays.keys() != entries.keys():
        raise ValueError("its digests are not those of its arrays")
    for name, letters in arrays.items():
        if not isinstance(letters, str) or len(letters) != DIGEST_LETTERS * _chunks(entries[name], chunk):
            raise ValueError(f"the digests of {name} are cut short")
    return Digests(chunk, arrays, header)


def _require_no_gaps(layout: Layout, available: int) -> None:
    position = 0
    for name, entry in sorted(layout.entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            raise ValueError(f"{name} does not begin where the array before it ends")
        position = entry.stop
    if position != available:
        raise ValueError(f"its arrays take {position:,} bytes, and {available:,} are there")
