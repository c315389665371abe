"""Reading untrusted files: sizes are checked before memory is allocated, and every failure is one line.

A reader does its work inside `reading(path, kind)`. Whatever goes wrong there, in our code or in a library, becomes a
`UserError` that names the file, because a damaged or hostile file can fail in more ways than a list can hold.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longtail.errors import UserError

MOST_TEXT = 1 << 30  # bytes of a text file: ten million lines of a list, and more
MOST_UNPACKED, MOST_RATIO = 1 << 28, 50  # bytes that any archive may unpack to, and times its own size beyond that
MOST_REASON = 160  # characters of a library's error message that are shown


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn any failure of the block into one error: "PATH is not KIND: reason", or the error of the system."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except MemoryError as error:
        raise UserError(f"{path} is not {kind}, or needs more memory than there is") from error
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"{path} cannot be read: {os.strerror(error.errno)}") from error
        raise UserError(f"{path} is not {kind}: {reason(error)}") from error
    except Exception as error:
        raise UserError(f"{path} is not {kind}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The message of an error as one short line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= MOST_REASON else said[:MOST_REASON] + "…"


def require_file(path: Path) -> int:
    """The size of a regular file; raises for a folder, a pipe or a device: opening a pipe could wait for ever."""
    with reading(path, "a file"):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a file")
    return found.st_size


def read_bytes(path: Path, kind: str, *, most: int) -> bytes:
    """The content of a file; raises if it has more than `most` bytes."""
    size = require_file(path)
    if size > most:
        raise UserError(f"{path} is too large to be {kind}: {size:,} bytes, at most {most:,} are read")
    with reading(path, kind), path.open("rb") as file:
        return file.read(size or most)  # a buffer of `most` bytes takes longer than the reading of a usual file


def require_small_archive(path: Path) -> None:
    """Refuse a zip archive that unpacks to far more bytes than it has: arrays of numbers compress little."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > MOST_UNPACKED + MOST_RATIO * path.stat().st_size:
        raise UserError(f"{path} would unpack to {unpacked:,} bytes, far more than it holds; it is not read")


def read_text(path: Path, kind: str, *, most: int = MOST_TEXT) -> str:
    """The content of a text file in UTF-8, with or without a byte order mark."""
    content = read_bytes(path, kind, most=most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not {kind} in UTF-8 (byte {error.start:,}); save it as UTF-8") from error
