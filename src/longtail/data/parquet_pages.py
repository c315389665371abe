"""What a Parquet file unpacks to, by the headers of its pages: the end of the file can say anything.

Arrow allocates what the header of a page says, so these headers are added up before anything is unpacked. Where the
pages of a column are is read here, too: asked for that, Arrow ends the process if the record of a column contradicts
itself. Headers and records are structs of Thrift's compact protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longtail.core.reading import MOST_RATIO, MOST_UNPACKED, require_file
from longtail.errors import UserError

MOST_ROWS = 1 << 20  # and one for each byte of the file: an image takes more
MOST_DEPTH = 8  # of structs in structs
MOST_RECORD = 1 << 26  # bytes of the record at the end of a file
UNPACKED_SIZE, PACKED_SIZE = 2, 3  # fields of a page header
ROW_GROUPS, COLUMNS, COLUMN = 4, 1, 3  # fields of the record: of a file, of a row group, of a chunk
PATH, CHUNK_SIZE, DATA_PAGE, DICTIONARY_PAGE = 3, 7, 9, 11  # of the record of a column
BINARY, LIST, SET, STRUCT = 8, 9, 10, 12  # types of fields
FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # type → bytes: true, false, byte, double
NUMBERS = (4, 5, 6)  # integers of two, four and eight bytes, as varints


def most_bytes(file: Path) -> int:
    """What a file may unpack to: images and words compress little."""
    return MOST_UNPACKED + MOST_RATIO * require_file(file)


def require_plausible(metadata: Any, file: Path, column: str) -> int:
    """Refuse a column that unpacks to far more bytes than its file has; returns the bytes of its largest first page.

    Such a page may be a dictionary: any number of rows can refer to a value in it.
    """
    if metadata.num_rows > MOST_ROWS + require_file(file):
        raise UserError(f"{file} would unpack to {metadata.num_rows:,} rows, far more than it holds; it is not read")
    total = largest = 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for begin, end in _chunks(content, column):
            for number, size in enumerate(_page_sizes(content, begin, end)):
                total += size
                largest = max(largest, size if number == 0 else 0)
                if total > most_bytes(file):
                    raise UserError(f"{file} would unpack to {total:,} bytes, far more than it holds; it is not read")
    return largest


def _chunks(content: mmap.mmap, column: str) -> Iterator[tuple[int, int]]:
    """Where the pages of a column, or of the parts of a nested one, begin and end."""
    end = len(content) - 8  # then come the size of the record, and four letters
    size = int.from_bytes(content[end : end + 4], "little")
    if not 0 < size <= min(end, MOST_RECORD):
        raise ValueError(f"a record of {size:,} bytes at its end")
    record, _ = _struct(content, end - size)
    for group in record[ROW_GROUPS]:
        for chunk in group[COLUMNS]:
            known = chunk[COLUMN]
            path = b".".join(known[PATH]).decode()
            if path == column or path.startswith(f"{column}."):
                first = known[DATA_PAGE]
                if 0 < known.get(DICTIONARY_PAGE, 0) < first:
                    first = known[DICTIONARY_PAGE]
                yield first, first + known[CHUNK_SIZE]


def _page_sizes(content: mmap.mmap, place: int, end: int) -> Iterator[int]:
    if place < 0:
        raise ValueError("a page before the file begins")
    while place < end:
        header, place = _struct(content, place)
        packed, unpacked = header[PACKED_SIZE], header[UNPACKED_SIZE]
        if packed < 0 or unpacked < 0:
            raise ValueError("a page of negative size")
        yield unpacked
        place += packed


def _struct(content: mmap.mmap, place: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a struct by their numbers, and where it ends."""
    found: dict[int, Any] = {}
    field = 0
    while kind := content[place]:
        place += 1
        if kind >> 4:
            field += kind >> 4
        else:
            field, place = _signed(content, place)
        found[field], place = _value(content, place, kind & 15, depth + 1)
    return found, place + 1


def _value(content: mmap.mmap, place: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of some type, and where it ends; numbers that are not whole are left out."""
    if depth > MOST_DEPTH:
        raise ValueError("a header of too many levels")
    if kind in FIXED:
        return None, place + FIXED[kind]
    if kind in NUMBERS:
        return _signed(content, place)
    if kind == STRUCT:
        return _struct(content, place, depth)
    if kind == BINARY:
        size, place = _varint(content, place)
        return content[place : place + size], place + size
    if kind not in (LIST, SET):
        raise ValueError(f"a header with a field of type {kind}")
    size, inner = content[place] >> 4, content[place] & 15
    place += 1
    if size == 15:
        size, place = _varint(content, place)
    values = []
    for _ in range(size):
        # In a list, unlike in a struct, a truth value takes a byte.
        value, place = (None, place + 1) if inner in (1, 2) else _value(content, place, inner, depth)
        content[place - 1]  # an IndexError at the end of the file
        values.append(value)
    return values, place


def _varint(content: mmap.mmap, place: int) -> tuple[int, int]:
    """A number of seven bits per byte, the lowest first."""
    value = shift = 0
    while True:
        byte = content[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _signed(content: mmap.mmap, place: int) -> tuple[int, int]:
    """A varint whose lowest bit is the sign."""
    value, place = _varint(content, place)
    return (value >> 1) ^ -(value & 1), place
