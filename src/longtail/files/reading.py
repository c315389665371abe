"""Reading untrusted files: sizes are checked before memory is allocated, and every failure is one line.

A reader does its work inside `reading(path, kind)`. Whatever goes wrong there, in our code or in a library, becomes a
`UserError` that names the file, because a damaged or hostile file can fail in more ways than a list can hold."""

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
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_REASON else text[:MOST_REASON] + "…"


def require_file(path: Path) -> int:
    """The size of a regular file; raises for a folder, a pipe or a device: opening a pipe could wait for ever."""
    with reading(path, "a file"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a file")
    return status.st_size


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


def require_plain(path: Path) -> None:
    """Refuse a link, a pipe or a device where a file of the library should be: it is never written through one."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(f"{path} is a link, a pipe or a device, and our files are never written through one; remove it")


def expanded(path: Path | str) -> Path:
    """The path with ~ and ~USER replaced by the home folder; an error if the system knows none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: the system knows no such home folder; give the whole path") from error


def resolved(path: Path) -> Path:
    """The path without links. Links that lead in a circle stay, so that opening them says so: no exception here."""
    return Path(os.path.realpath(path))


def require_replaceable(path: Path) -> None:
    """Refuse to replace a folder, a pipe or a device by a file: /dev/null would be gone."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # whoever makes the file says what is in the way
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder; choose the name of a file")
    if not stat.S_ISREG(mode) or (path.is_symlink() and str(path.readlink()).startswith("/proc/")):
        raise UserError(f"{path} is a pipe or a device, which a file cannot replace; choose the name of a file")
