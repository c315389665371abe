"""Atomic writes: a reader sees the old content of a file or folder or the new one, never a part of it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from longtail.core.exchange import exchange
from longtail.core.locks import claimed, is_abandoned, locked
from longtail.core.opening import require_replaceable, resolved
from longtail.errors import UserError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes `path`; an error of the operating system becomes one `UserError` that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise UserError(f"cannot write {path}: {error}") from error
        named = str(error.filename or path)
        where = "" if named == str(path) or ".part" in named else f"{named}: "
        raise UserError(f"cannot write {path}: {where}{os.strerror(error.errno)}{_space(path, error)}") from error


def _space(path: Path, error: OSError) -> str:
    if error.errno not in NO_SPACE:
        return ""
    with suppress(OSError):
        return f"; {shutil.disk_usage(path.parent).free:,} bytes are free there: make room and run the command again"
    return "; make room and run the command again"


def reserve(file: IO[bytes], size: int, path: Path) -> None:
    """Reserve the space of a file before it is written: on a full disk, a write to a mapped file kills the process."""
    try:
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise UserError(f"{path} needs {size:,} bytes: {os.strerror(error.errno)}{_space(path, error)}") from error
        if error.errno not in CANNOT_RESERVE:
            raise
    file.truncate(size)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it is renamed to `path` only if the block succeeds."""
    with writing(path):
        require_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in _unfinished(path):
            if left.is_file() and is_abandoned(left):  # its writer was killed
                left.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        temporary = Path(name)
        try:
            with claimed(handle):
                if not temporary.exists():  # another writer removed it as abandoned before it was locked
                    temporary.touch()
                yield temporary
                temporary.chmod(0o666 & ~_umask())
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
                _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def require_own(folder: Path, own: Sequence[str], kind: str) -> None:
    """Refuse to replace a folder that holds files with other names than these, because they would be lost."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --out")
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder} is a link that leads nowhere; choose another --out")
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    strange = [path.name for path in found if not any(path.match(pattern) for pattern in own)]
    if strange:
        raise UserError(f"{folder} holds files that are not part of {kind} ({strange[0]}); choose another --out")
    if folder.is_dir() and Path.cwd().is_relative_to(resolved(folder)):
        raise UserError(f"{folder} is the current folder, which cannot be replaced; choose another --out")


@contextmanager
def replacing_folder(path: Path, own: Sequence[str], kind: str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; it replaces `path` only if the block succeeds.

    One process at a time writes a folder; what others that were killed have left is removed first. A folder that holds
    anything but files of the names `own`, the parts of a `kind`, is not replaced.
    """
    path = resolved(path)
    with writing(path), locked(path):
        _restore(path)
        require_own(path, own, kind)
        remove_unfinished(path)
        outer = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        try:
            temporary = outer / "new"
            temporary.mkdir()
            yield temporary
            _sync(temporary)
            _put(temporary, path, outer / "old")
            _sync(path.parent)
        finally:
            shutil.rmtree(outer, ignore_errors=True)


def _put(new: Path, path: Path, old: Path) -> None:
    if path.exists() and exchange(new, path):
        return
    # If the system cannot exchange two paths, `path` is missing for a moment; `settle` restores it after a kill.
    if path.exists():
        path.rename(old)
    new.rename(path)


def settle(path: Path) -> None:
    """Restore a folder whose replacement was interrupted between its two steps."""
    if not path.exists() and any(_unfinished(path)):
        with locked(path):
            _restore(path)


def _restore(path: Path) -> None:
    for left in _unfinished(path):
        if not path.exists() and (left / "old").is_dir():
            (left / "old").rename(path)


def _unfinished(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{escape(path.name)}.*.part"))


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left behind; the caller must hold the lock."""
    for left in _unfinished(path):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk, on systems that can open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_bytes(path: Path, content: bytes) -> Path:
    with replacing(path) as temporary, temporary.open("wb") as file:
        reserve(file, len(content), path)
        file.write(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Text in UTF-8; what has no place there, such as bytes of a file name, is written as \\udcff."""
    return write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> Path:
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError as error:
        raise UserError(f"cannot write {path}: a number in it is not finite") from error
    return write_text(path, text + "\n")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The folder of downloaded data sets: `$LONGTAIL_CACHE`, or `~/.cache/longtail`."""
    if given := os.environ.get("LONGTAIL_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "longtail"
    except RuntimeError as error:  # a user whom the system does not know, as in many containers
        raise UserError("this user has no home folder for data sets; set LONGTAIL_CACHE to a folder") from error
