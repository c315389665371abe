"""The options of a command, read from its dataclass: for completion, and to name a mistyped one."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from longtail.errors import UserError

ALWAYS = ("--help",)


@dataclass(frozen=True)
class Word:
    """An option such as --batch-size, or a positional word (its name without dashes)."""

    name: str
    takes_value: bool
    is_path: bool
    choices: tuple[str, ...] = ()
    several: bool = False


def words_of(kind: Any) -> list[Word]:
    """Every option and positional word of a command's dataclass, those of nested settings too."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        marks, hint = _unwrap(hints[field.name])
        if dataclasses.is_dataclass(hint):
            found += words_of(hint)
            continue
        parts = [_unwrap(part)[1] for part in _alternatives(hint)]
        choices = tuple(str(value) for part in parts if get_origin(part) is Literal for value in get_args(part))
        dashes = "" if tyro.conf.Positional in marks else "--"
        name = dashes + field.name.replace("_", "-")
        several = any(get_origin(part) in (tuple, list, dict) for part in (hint, *parts))
        found.append(Word(name, hint is not bool, Path in parts or field.name == "root", choices, several))
    return found


def _unwrap(hint: Any) -> tuple[tuple[Any, ...], Any]:
    """The marks of an annotated type, and the type."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return tuple(marks), inner
    return (), hint


def _alternatives(hint: Any) -> list[Any]:
    """The types in a union or a tuple, and the type itself."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return [part for part in get_args(hint) if part not in (type(None), Ellipsis)]
    return [hint]


def require_known(kind: Any, words: Sequence[str], command: str) -> None:
    """Raise for the first option that the command does not have."""
    options = {word.name: word for word in words_of(kind)}
    known = [*ALWAYS, *options]
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if equals and name in options and not options[name].takes_value:
            raise UserError(f"{name} takes no value: leave out ={value}")
        if name.startswith("--") and len(name) > 2 and name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"unknown option {name}{hint}; see longtail {command} --help")
