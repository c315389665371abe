"""Files and folders that appear whole or not at all, and locks for one writer at a time.

New content is written in the folder `.NAME.part` beside its target and renamed at the end. The writer holds a lock in
that folder. The operating system releases a lock when its process ends, so the next writer of the same target knows
that everything it finds there was left by a killed process, and removes it.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from longtail.errors import UserError
from longtail.files.reading import require_plain, resolved

LOCK_FILE = ".lock"  # in a folder that a process has locked
LOCK_SECONDS = 10.0  # to wait for the lock of a folder: by then a process that was killed has ended
NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def locked(path: Path, timeout: float | None = None) -> AbstractContextManager[None]:
    """Only one process at a time runs the block for `path`; the others wait, at most `timeout` seconds."""
    return _lock(path.with_name(f".{path.name}.lock"), timeout)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
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
            holder = ""
            with suppress(OSError):
                holder = file.read_text(encoding="utf-8", errors="replace")[:200]
            raise UserError(
                f"{file.parent} is in use by {holder or 'another process'}; wait until it is done, or stop it"
            ) from error
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


@contextmanager
def _part_folder(path: Path, timeout: float | None = None) -> Iterator[Path]:
    """The folder of the new content of `path`, locked; what a killed writer left there is removed first.

    At the end the folder is removed, too. If a killed writer has moved the old content of `path` there, it goes back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    if part.is_symlink() or part.is_file():
        part.unlink()

    def clear() -> None:
        with suppress(OSError):
            if not path.exists():
                (part / "old").rename(path)
        for left in (part / "old", part / "new"):
            left.unlink() if left.is_symlink() else shutil.rmtree(left, ignore_errors=True)

    try:
        with _lock(part / LOCK_FILE, timeout):
            clear()
            try:
                (part / "new").mkdir()
                yield part
            finally:
                clear()
    finally:
        with suppress(OSError):
            part.rmdir()  # fails if the next writer has locked it


def remove_unfinished(path: Path) -> None:
    """Remove what a killed writer of `path` left behind, but nothing that a process is writing now."""
    if os.path.lexists(path.with_name(f".{path.name}.part")):
        with suppress(UserError), _part_folder(path, timeout=0):
            pass


def restore_interrupted(path: Path) -> None:
    """Restore a folder whose replacement was interrupted between its two steps."""
    if not path.exists() and path.with_name(f".{path.name}.part").exists():
        with _part_folder(path):
            pass


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
        reason = error.strerror or os.strerror(error.errno)
        if error.errno in NO_SPACE:
            with suppress(OSError):
                reason += f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
            reason += ": make room and run the command again"
        raise UserError(f"cannot write {path}: {where}{reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file; it is renamed to `path` only if the block succeeds.

    A folder, a pipe or a device is not replaced: `--out /dev/null` would remove the device.
    """
    with writing(path):
        with suppress(FileNotFoundError, NotADirectoryError):  # creating the file shows what is wrong
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise UserError(f"{path} is a folder; choose the name of a file")
            if not stat.S_ISREG(mode) or (path.is_symlink() and str(path.readlink()).startswith("/proc/")):
                raise UserError(f"{path} is a pipe or a device, which a file cannot replace; choose the name of a file")
        with _part_folder(path) as part:
            temporary = part / "new" / path.name
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)


def require_free(folder: Path, names: Sequence[str], kind: str, *, overwrite: bool) -> None:
    """Refuse a folder that holds files with other names than these, or any files unless they are to be replaced."""
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
    if content and not overwrite:
        raise UserError(f"{folder} exists already; choose another --out or replace it with --overwrite")


@contextmanager
def replacing_folder(path: Path, names: Sequence[str], kind: str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; it replaces `path` only if the block succeeds.

    A folder that holds files with other names than these is not replaced. `path` is missing for a moment between two
    renames; `restore_interrupted` and the next writer restore it if the process is killed there.
    """
    path = resolved(path)
    with writing(path), _part_folder(path) as part:
        require_free(path, names, kind, overwrite=True)
        yield part / "new"
        if path.exists():
            path.rename(part / "old")
        (part / "new").rename(path)


def write_bytes(path: Path, content: bytes | bytearray) -> Path:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
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
