"""Exchange two paths in one step, so that both exist at every moment."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

CURRENT_FOLDER = -100  # AT_FDCWD
LINUX_EXCHANGE = 2  # RENAME_EXCHANGE
MACOS_SWAP = 2  # RENAME_SWAP


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths; returns False if the operating system or the file system cannot do it."""
    library, first, second = _library(), os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):
        arguments = (CURRENT_FOLDER, first, CURRENT_FOLDER, second, ctypes.c_uint(LINUX_EXCHANGE))
        return bool(library.renameat2(*arguments) == 0)
    if hasattr(library, "renamex_np"):
        return bool(library.renamex_np(first, second, ctypes.c_uint(MACOS_SWAP)) == 0)
    return False
