"""Options of methods given as text, on the command line or in a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from longtail.errors import choose


def parse_options(options: dict[str, str], *functions: Callable[..., object]) -> dict[str, object]:
    """Options converted to values, with `-` or `_` in names; an error lists the names that the functions accept."""
    known = dict.fromkeys(name for function in functions for name in _names(function))
    return {choose("option", name.replace("-", "_"), known): _value(text) for name, text in options.items()}


def _names(function: Callable[..., object]) -> list[str]:
    given = ("self", "backbone", "class_counts")
    return [name for name in inspect.signature(function).parameters if name not in given]


def taken_by(options: dict[str, object], function: Callable[..., object]) -> dict[str, object]:
    """The options that a function accepts."""
    return {name: value for name, value in options.items() if name in _names(function)}


def _value(text: str) -> object:
    """The value of a word: a number, True or False, None, or the word itself."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
