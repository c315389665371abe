"""Journals: files to which one process appends JSON objects, one per line.

A process that is killed while it writes leaves an incomplete last line. Readers skip this line, and the next writer,
which holds the lock of the folder, removes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longtail.core.files import write_bytes, writing
from longtail.core.opening import open_own
from longtail.core.reading import read_bytes
from longtail.core.records import refuse
from longtail.errors import UserError

MOST_BYTES = 1 << 28
KIND = "a journal of longtail"


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one line in a single write."""
    line = (json.dumps(value) + "\n").encode()
    with writing(path), os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
        begin = file.tell()
        try:
            if file.write(line) != len(line):
                file.write(line[file.tell() - begin :])  # raises the reason, such as a full disk
        except OSError:
            file.truncate(begin)
            raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal; an empty list if the file does not exist."""
    if not path.exists():
        return []
    content = read_bytes(path, KIND, most=MOST_BYTES)
    return [_parsed(line, number, path) for number, line in enumerate(content.split(b"\n")[:-1], 1)]


def keep_lines(path: Path, kept: list[dict[str, Any]]) -> None:
    """Keep only these lines of a journal; a file that already has exactly these lines is not rewritten."""
    content = "".join(json.dumps(value) + "\n" for value in kept).encode()
    if path.exists() and read_bytes(path, KIND, most=MOST_BYTES) != content:
        write_bytes(path, content)


def _parsed(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: line {number} is not what was written; remove that line")
    return value
