"""Writing files so that a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from filelock import FileLock


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it into place only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`; it takes the place of `path` only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".part", dir=path.parent) as outer:
        temporary, before = Path(outer) / "new", Path(outer) / "old"
        temporary.mkdir()
        yield temporary
        if path.exists():
            path.rename(before)
        temporary.rename(path)


def remove_unfinished(path: Path) -> None:
    """Drop the temporary files of writers of `path` that were killed; nobody may be writing it now."""
    for left in path.parent.glob(f".{escape(path.name)}.*.part"):
        left.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_text(path: Path, text: str) -> Path:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time is in the block for `path`; the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where downloaded data sets live: `$LONGTAIL_CACHE`, or `~/.cache/longtail`."""
    return Path(os.environ.get("LONGTAIL_CACHE") or Path.home() / ".cache" / "longtail")
