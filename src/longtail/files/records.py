"""JSON files and journals as typed records, with the format version that every file of the library has; provenance.

A process that is killed while it appends to a journal leaves an incomplete last line. Readers skip this line, and the
next writer, which holds the lock of the folder, removes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from longtail.errors import LARGEST, UserError
from longtail.files.atomic import write_bytes, writing
from longtail.files.reading import read_bytes, read_text, reason, require_plain

FORMAT = 1
PACKAGES = ("longtail", "torch", "numpy", "scipy", "scikit-learn", "pillow")


class NewerFormat(UserError):
    """A file of a later version of the library."""


def format_of(details: dict[str, Any], path: Path) -> int:
    """The format version in the header of a file; 0 for files written before versions existed.

    A newer version than this library supports is an error.
    """
    version = details.get("format", 0)
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise UserError(f"{path} is damaged: its format is {version!r}, not a number")
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has format {version}, this longtail reads up to {FORMAT}; upgrade longtail to open it"
        )
    return version


T = TypeVar("T")
MAX_BYTES = 1 << 28  # far above the size of any JSON file or journal that the library writes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an error names the file and says what is wrong with it."""
    text = read_text(path, "a file of longtail", max_bytes=MAX_BYTES)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is damaged: {reason(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds {_shortened(value)} instead of named values")
    return value


def _refuse_constant(word: str) -> None:
    """The library writes no NaN and no infinity."""
    raise ValueError(f"{word} is no number")


def as_record(kind: type[T], values: Any, path: Path, name: str = "") -> T:
    """A dataclass from the values of a JSON object, called `name` in errors; values with other names are ignored."""
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: {name or 'it'} should hold named values, not {_shortened(values)}")
    hints, fields = _hints(kind), {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        qualified = f"{name}.{field.name}" if name else field.name
        if field.name in values:
            fields[field.name] = checked(hints[field.name], values[field.name], path, qualified)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{path} is damaged: it has no {qualified}")
    return kind(**fields)


def as_typed(kind: Any, values: dict[str, Any], path: Path) -> Any:
    """A `TypedDict` from the values of a JSON object; all of them are required."""
    missing = [name for name in _hints(kind) if name not in values]
    if missing:
        raise UserError(f"{path} is damaged: it has no {missing[0]}")
    return {name: checked(hint, values[name], path, name) for name, hint in _hints(kind).items()}


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def checked(hint: Any, value: Any, path: Path, name: str) -> Any:
    """The value, checked against the type of its field."""
    if dataclasses.is_dataclass(hint):
        return as_record(hint, value, path, name)  # type: ignore[arg-type]
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        (required,) = (option for option in inner if option is not type(None))
        return None if value is None else checked(required, value, path, name)
    if kind in (list, tuple) and isinstance(value, list):
        return kind(checked(inner[0], item, path, f"{name}[{number}]") for number, item in enumerate(value))
    if kind is dict and isinstance(value, dict):
        return {key: checked(inner[1], item, path, f"{name}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    wanted = (int, float) if hint is float else kind or hint
    # In Python a bool is an int; in these files it is not.
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise UserError(
            f"{path} is damaged: {name} is {_shortened(value)}, not of type {getattr(hint, '__name__', hint)}"
        )
    most = LARGEST if isinstance(value, int) else sys.float_info.max
    if isinstance(value, int | float) and not abs(value) <= most:
        raise UserError(f"{path} is damaged: {name} is {_shortened(value)}, which longtail never writes")
    return value


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:40] + "…"


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one line to a journal, in a single write."""
    line = (json.dumps(value) + "\n").encode()
    require_plain(path)
    with writing(path), path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            if file.write(line) != len(line):
                file.write(line[file.tell() - begin :])  # raises the reason, such as a full disk
        except OSError:
            file.truncate(begin)
            raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal; an empty list if the file does not exist."""
    content = read_bytes(path, "a journal of longtail", max_bytes=MAX_BYTES) if path.exists() else b""
    values = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line, parse_constant=_refuse_constant))
        if len(values) < number or not isinstance(values[-1], dict):
            raise UserError(f"{path} is damaged: line {number} is not what was written; remove that line")
    return values


def keep_lines(path: Path, kept: list[dict[str, Any]]) -> None:
    """Keep only these lines of a journal; a file that already has exactly these lines is not rewritten."""
    content = "".join(json.dumps(value) + "\n" for value in kept).encode()
    if path.exists() and read_bytes(path, "a journal of longtail", max_bytes=MAX_BYTES) != content:
        write_bytes(path, content)


def versions() -> dict[str, str]:
    """Python and the packages that results depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def provenance() -> dict[str, str]:
    """The record that is stored beside a result of this process."""
    script, *words = sys.argv
    program = ["longtail"] if Path(script).name in ("longtail", "__main__.py") else ["python", script]
    return {
        "command": shlex.join([*program, *words]),
        "commit": _commit(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }


def _commit() -> str:
    """The commit of the source in use, if it is a checkout."""
    source = Path(__file__).resolve().parents[1]
    if not (source.parents[1] / ".git").exists():
        return "none: an installed package"

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=source, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "--", ".") else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
