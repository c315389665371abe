"""The version of everything the library writes to disk, and what becomes of other versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtail.errors import UserError

FORMAT = 1


class NewerFormat(UserError):
    """A file of a later version of the library."""


def format_of(details: dict[str, Any], path: Path) -> int:
    """The version a file says it has; 0 for files from before there were versions.

    A newer version than this library knows is an error: what it means is not known here.
    """
    found = details.get("format", 0)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError(f"{path} is damaged: its format is {found!r}, not a number")
    if found > FORMAT:
        raise NewerFormat(f"{path} has format {found}, this longtail reads up to {FORMAT}; upgrade longtail to open it")
    return found
