"""Paths that may come from a stranger: our own files are opened without following links, and devices stay."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from longtail.errors import UserError

# Without waiting for the reader of a pipe, and not behind a link, where the system knows these flags.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def open_own(path: Path, flags: int) -> int:
    """A handle on a file of the library, made if missing; a link, a pipe or a device in its place is an error."""
    try:
        handle = os.open(path, flags | os.O_CREAT | _FLAGS, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UserError(
                f"{path} is a link or a pipe, and our files are never written through one; remove it"
            ) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is not a file; remove it")
    return handle


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
    """Refuse to put a file in the place of a folder, a pipe or a device: /dev/null would be gone."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # whoever makes the file says what is in the way
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder; choose the name of a file")
    if not stat.S_ISREG(mode) or (path.is_symlink() and str(path.readlink()).startswith("/proc/")):
        raise UserError(f"{path} is a pipe or a device, which a file cannot replace; choose the name of a file")
