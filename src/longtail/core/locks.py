"""Locks for one process at a time. The operating system releases a lock when its process ends, so no lock is stale."""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtail.core.opening import open_own
from longtail.errors import UserError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"  # in a folder that a process holds
PATIENCE = 10.0  # seconds to wait for a lock: by then a process that was killed has ended
POLL_SECONDS = 0.05
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_held: set[int] = set()


def _forget_in_child() -> None:
    """Close the handles in a worker process: a copy would keep the lock after its holder has ended."""
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def locked(path: Path, patience: float | None = None) -> Iterator[None]:
    """Only one process at a time runs the block for `path`; the others wait, at most `patience` seconds."""
    with _holding(path.with_name(f".{path.name}.lock"), patience):
        yield


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs; an error names another holder. A new folder left empty is removed."""
    is_new = not folder.exists()
    try:
        with _holding(folder / LOCK_FILE, PATIENCE):
            yield
    finally:
        with suppress(OSError):
            if is_new:
                folder.rmdir()


@contextmanager
def claimed(handle: int) -> Iterator[None]:
    """Mark an open file as in use until the block or this process ends; then the file is closed."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
    _held.add(handle)
    try:
        yield
    finally:
        _held.discard(handle)
        with suppress(OSError):
            os.close(handle)


def is_abandoned(file: Path) -> bool:
    """Whether the process that claimed a file has ended; False if that cannot be known."""
    if fcntl is None:
        return False
    try:
        handle = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def _holding(file: Path, patience: float | None) -> Iterator[None]:
    handle = _acquire(file, patience)
    _held.add(handle)
    try:
        with suppress(OSError):  # a full disk: the lock works without the name of its holder
            os.ftruncate(handle, 0)
            os.pwrite(handle, _own_name().encode(errors="replace"), 0)
        yield
    finally:
        # Removed before it is released: a process that waits for this file sees that it is gone, and tries again.
        with suppress(OSError):
            file.unlink()
        _held.discard(handle)
        with suppress(OSError):
            os.close(handle)


def _acquire(file: Path, patience: float | None) -> int:
    deadline = None if patience is None else time.monotonic() + patience
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = open_own(file, os.O_RDWR)
        except FileNotFoundError:
            continue  # the last holder has just removed an empty folder
        try:
            taken = _take(handle, file)
        except BaseException:
            os.close(handle)
            raise
        if taken and _is_still(handle, file):
            return handle
        os.close(handle)
        if not taken and deadline is not None and time.monotonic() > deadline:
            raise UserError(f"{file.parent} is in use by {_holder(file)}; wait until it is done, or stop it")
        if not taken:
            time.sleep(POLL_SECONDS)


def _take(handle: int, file: Path) -> bool:
    if fcntl is None:
        return _warn(file)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return _warn(file)
        raise
    return True


def _warn(file: Path) -> bool:
    warnings.warn(f"{file.parent} cannot be locked here; let only one process write to it", stacklevel=2)
    return True


def _is_still(handle: int, file: Path) -> bool:
    """Whether the locked file still exists under this name: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _own_name() -> str:
    words = " ".join(["longtail", *sys.argv[1:4]])
    return f"process {os.getpid()} on {platform.node()} ({words[:60]})"


def _holder(file: Path) -> str:
    try:
        said = file.read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        said = ""
    return said or "another process"
