"""Reading untrusted files: sizes are checked before memory is allocated, and every failure is one line.

A reader does its work inside `reading(path, kind)`. Whatever goes wrong there, in our code or in a library, becomes a
`UserError` that names the file, because a damaged or hostile file can fail in more ways than a list can hold."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtail.errors import UserError

MAX_TEXT = 1 << 30  # bytes of a text file: ten million lines of a list, and more
MAX_UNPACKED, MAX_RATIO = 1 << 28, 50  # bytes that any archive may unpack to, and times its size beyond that
MAX_REASON = 160  # characters of a library's error message that are shown


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
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "…"


def require_file(path: Path) -> int:
    """The size of a regular file; raises for a folder, a pipe or a device: opening a pipe could wait for ever."""
    with reading(path, "a file"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a file")
    return status.st_size


def read_bytes(path: Path, kind: str, *, max_bytes: int) -> bytes:
    """The content of a file; raises if it has more bytes than `max_bytes`."""
    size = require_file(path)
    if size > max_bytes:
        raise UserError(f"{path} is too large to be {kind}: {size:,} bytes, at most {max_bytes:,} are read")
    with reading(path, kind), path.open("rb") as file:
        return file.read(size or max_bytes)  # a buffer of `max_bytes` takes longer than the reading of a usual file


def require_small_archive(path: Path) -> None:
    """Refuse a zip archive that unpacks to far more bytes than it has: arrays of numbers compress little."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > MAX_UNPACKED + MAX_RATIO * path.stat().st_size:
        raise UserError(f"{path} would unpack to {unpacked:,} bytes, far more than it holds; it is not read")


def read_text(path: Path, kind: str, *, max_bytes: int = MAX_TEXT) -> str:
    """The content of a text file in UTF-8, with or without a byte order mark."""
    content = read_bytes(path, kind, max_bytes=max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not {kind} in UTF-8 (byte {error.start:,}); save it as UTF-8") from error


def require_plain(path: Path) -> None:
    """Refuse a link, a pipe or a device where a file of the library should be: it is never written through one."""
    with suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            return
        raise UserError(f"{path} is a link, a pipe or a device, and our files are never written through one; remove it")


def expanded(path: Path | str) -> Path:
    """The path with ~ and ~USER replaced by the home folder; an error if the system knows none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: the system knows no such home folder; give the whole path") from error


def resolved(path: Path) -> Path:
    """The path without links. Unlike `Path.resolve`, it raises no exception for links that lead in a circle."""
    return Path(os.path.realpath(path))
