"""The format version of every file that the library writes, and the check of it when a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtail.errors import UserError

FORMAT = 1


class NewerFormat(UserError):
    """A file of a later version of the library."""


def format_of(details: dict[str, Any], path: Path) -> int:
    """The format version in the header of a file; 0 for files written before versions existed.

    A newer version than this library knows is an error: what it means is not known here.
    """
    found = details.get("format", 0)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError(f"{path} is damaged: its format is {found!r}, not a number")
    if found > FORMAT:
        raise NewerFormat(f"{path} has format {found}, this longtail reads up to {FORMAT}; upgrade longtail to open it")
    return found
