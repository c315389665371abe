"""Journals: files to which one process appends JSON objects, a line each.

A process that was killed while it wrote leaves a torn last line. That is normal: readers skip it, and the next writer,
who holds the folder, cuts it off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longtail.core.files import write_bytes, writing
from longtail.core.reading import read_bytes
from longtail.core.records import refuse
from longtail.errors import UserError

MOST_BYTES = 1 << 28
KIND = "a journal of ours"


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Add one line, in one piece."""
    line = (json.dumps(value) + "\n").encode()
    with writing(path), path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            if file.write(line) != len(line):
                file.write(line[file.tell() - begin :])  # the system says why the rest has no place
        except OSError:
            file.truncate(begin)
            raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; none where there is no file."""
    if not path.exists():
        return []
    content = read_bytes(path, KIND, most=MOST_BYTES)
    return [_parsed(line, number, path) for number, line in enumerate(content.split(b"\n")[:-1], 1)]


def keep_lines(path: Path, kept: list[dict[str, Any]]) -> None:
    """Let a journal hold these of its lines and nothing else; a file that does already is left as it is."""
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
