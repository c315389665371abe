"""JSON files as typed records: the types are checked once, when a file is opened."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from longtail.core.reading import read_text, reason
from longtail.errors import LARGEST, UserError

T = TypeVar("T")
LARGEST_FILE = 1 << 28  # bytes; far above the size of any JSON file that the library writes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an error names the file and says what is wrong with it."""
    text = read_text(path, "a file of longtail", most=LARGEST_FILE)
    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is damaged: {reason(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds {_said(value)} instead of named values")
    return value


def refuse(word: str) -> None:
    """We write no NaN and no infinity."""
    raise ValueError(f"{word} is no number")


def as_record(kind: type[T], values: dict[str, Any], path: Path) -> T:
    """A dataclass from the values of a JSON object; values with other names are ignored."""
    return _record(kind, values, path, "")


def as_typed(kind: Any, values: dict[str, Any], path: Path) -> Any:
    """A `TypedDict` from the values of a JSON object; all of them are required."""
    missing = [name for name in _hints(kind) if name not in values]
    if missing:
        raise UserError(f"{path} is damaged: it has no {missing[0]}")
    return {name: checked(hint, values[name], path, name) for name, hint in _hints(kind).items()}


def _record(kind: Any, values: Any, path: Path, place: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: {place or 'it'} should hold named values, not {_said(values)}")
    hints, found = _hints(kind), {}
    for field in dataclasses.fields(kind):
        name = f"{place}.{field.name}" if place else field.name
        if field.name in values:
            found[field.name] = checked(hints[field.name], values[field.name], path, name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{path} is damaged: it has no {name}")
    return kind(**found)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def checked(hint: Any, value: Any, path: Path, place: str) -> Any:
    """The value, checked against the type of its field."""
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, path, place)
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        (own,) = (part for part in inner if part is not type(None))
        return None if value is None else checked(own, value, path, place)
    if kind in (list, tuple) and isinstance(value, list):
        items = [checked(inner[0], item, path, f"{place}[{number}]") for number, item in enumerate(value)]
        return kind(items)
    if kind is dict and isinstance(value, dict):
        return {name: checked(inner[1], item, path, f"{place}.{name}") for name, item in value.items()}
    if hint is Any:
        return value
    wanted = (int, float) if hint is float else kind or hint
    # In Python a bool is an int; in these files it is not.
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{path} is damaged: {place} is {_said(value)}, not of type {getattr(hint, '__name__', hint)}")
    most = LARGEST if isinstance(value, int) else sys.float_info.max
    if isinstance(value, int | float) and not abs(value) <= most:
        raise UserError(f"{path} is damaged: {place} is {_said(value)}, which longtail never writes")
    return value


def _said(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:40] + "…"
