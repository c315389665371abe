"""Files and folders that appear whole or not at all, and locks for one writer at a time.

Content is written into a temporary folder beside its target, `.NAME.XXXXXXXX.part`, and renamed at the end. The writer
holds a lock inside this folder. The operating system releases a lock when its process ends, so the next writer of the
same target can tell which temporary folders were abandoned by killed processes, and removes them.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from longtail.errors import UserError
from longtail.files.reading import require_plain, require_replaceable, resolved

LOCK_FILE = ".lock"  # in a folder that a process holds
LOCK_SECONDS = 10.0  # to wait for the lock of a folder: by then a process that was killed has ended
NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def locked(path: Path, timeout: float | None = None) -> Iterator[None]:
    """Only one process at a time runs the block for `path`; the others wait, at most `timeout` seconds."""
    with _lock(path.with_name(f".{path.name}.lock"), timeout):
        yield


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs; an error names another holder. A new folder left empty is removed."""
    is_new = not folder.exists()
    try:
        with _lock(folder / LOCK_FILE, LOCK_SECONDS):
            yield
    finally:
        with suppress(OSError):
            if is_new:
                folder.rmdir()


@contextmanager
def _lock(file: Path, timeout: float | None) -> Iterator[None]:
    from filelock import FileLock, Timeout  # imported here because only writers need it

    require_plain(file)
    lock = FileLock(file, timeout=-1 if timeout is None else timeout)
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:
            continue  # the last holder has just removed an empty folder
        except Timeout as error:
            raise UserError(f"{file.parent} is in use by {_holder(file)}; wait until it is done, or stop it") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(f"{file.parent} cannot be locked here; let only one process write to it", stacklevel=2)
        break
    try:
        with suppress(OSError):  # a full disk: the lock works without the name of its holder
            command = " ".join(["longtail", *sys.argv[1:4]])[:60]
            holder = f"process {os.getpid()} on {platform.node()} ({command})"
            file.write_text(holder, encoding="utf-8", errors="replace")
        yield
    finally:
        # Removed before it is released: a process that waits for this file notices, and tries again.
        with suppress(OSError):
            file.unlink()
        lock.release()


def _holder(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")[:200] or "another process"
    return "another process"


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, removed at the end; folders that killed processes left for `path` are removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        with _lock(folder / LOCK_FILE, None):
            yield folder
    finally:
        _discard(folder, path)


def remove_unfinished(path: Path) -> None:
    """Remove what killed writers of `path` left behind, but nothing that a process is writing now."""
    for left in _unfinished(path):
        if left.is_symlink() or not left.is_dir():
            left.unlink(missing_ok=True)
            continue
        with suppress(UserError), _lock(left / LOCK_FILE, 0):  # a lock that is held belongs to a living writer
            _discard(left, path)


def _unfinished(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{escape(path.name)}.*.part"))


def _discard(folder: Path, path: Path) -> None:
    """Remove a temporary folder; the old content of `path` goes back if its replacement was interrupted."""
    with suppress(OSError):
        if not path.exists():
            (folder / "old").rename(path)
    shutil.rmtree(folder, ignore_errors=True)


def settle(path: Path) -> None:
    """Restore a folder whose replacement was interrupted between its two steps."""
    if not path.exists() and _unfinished(path):
        with locked(path):
            remove_unfinished(path)


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
    """Yields the path of a temporary file; it is renamed to `path` only if the block succeeds."""
    with writing(path):
        require_replaceable(path)
        with temporary_folder(path) as folder:
            temporary = folder / path.name
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)


def require_own(folder: Path, names: Sequence[str], kind: str) -> None:
    """Refuse to replace a folder that holds files with other names than these, because they would be lost."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --out")
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder} is a link that leads nowhere; choose another --out")
    content = sorted(folder.iterdir()) if folder.is_dir() else []
    others = [path.name for path in content if not any(path.match(name) for name in names)]
    if others:
        raise UserError(f"{folder} holds files that are not part of {kind} ({others[0]}); choose another --out")
    if folder.is_dir() and Path.cwd().is_relative_to(resolved(folder)):
        raise UserError(f"{folder} is the current folder, which cannot be replaced; choose another --out")


def require_free(folder: Path, names: Sequence[str], kind: str, *, overwrite: bool) -> None:
    """Refuse a folder that holds other files than these, or any files unless they are to be replaced."""
    require_own(folder, names, kind)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UserError(f"{folder} exists already; choose another --out or replace it with --overwrite")


@contextmanager
def replacing_folder(path: Path, names: Sequence[str], kind: str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; it replaces `path` only if the block succeeds.

    One process at a time writes a folder. A folder that holds files with other names than these is not replaced. `path`
    is missing for a moment between two renames; `settle` and the next writer restore it if the process is killed there.
    """
    path = resolved(path)
    with writing(path), locked(path):
        remove_unfinished(path)
        require_own(path, names, kind)
        with temporary_folder(path) as folder:
            new = folder / "new"
            new.mkdir()
            yield new
            _sync(new)
            if path.exists():
                path.rename(folder / "old")
            new.rename(path)
            _sync(path.parent)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk, on systems that can open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, content: bytes | bytearray) -> Path:
    with replacing(path) as temporary, temporary.open("wb") as file:
        reserve(file, len(content), path)
        file.write(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Text in UTF-8; what UTF-8 cannot hold, such as bytes of a file name, is written as \\udcff."""
    return write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Any) -> Path:
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError as error:
        raise UserError(f"cannot write {path}: a number in it is not finite") from error
    return write_text(path, text + "\n")


def cache_folder() -> Path:
    """The folder of downloaded data sets: `$LONGTAIL_CACHE`, or `~/.cache/longtail`."""
    if given := os.environ.get("LONGTAIL_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "longtail"
    except RuntimeError as error:  # a user without an entry in the system, as in many containers
        raise UserError("this user has no home folder for data sets; set LONGTAIL_CACHE to a folder") from error
