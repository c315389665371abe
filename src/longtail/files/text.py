"""Numbers as text, and untrusted text without control characters or markup."""

from __future__ import annotations

import csv
import inspect
import io
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from longtail.errors import choose

# Characters that move the cursor, change the direction of writing or do not exist in UTF-8.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def percent(value: float | None) -> str:
    """A share as a percentage.

    >>> percent(0.4567), percent(None)
    ('45.7', 'none')
    """
    return "none" if value is None else f"{100 * value:.1f}"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Names in a sentence; of many, only the first.

    >>> some_of(["cat", "dog"]), some_of(["cat", "dog", "hen"], most=1)
    ('cat, dog', 'cat and 2 more')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def command_on(name: str, run: Path | str, root: str | None = None, *more: str) -> str:
    """A command to type, on a run whose data set is below `root`.

    >>> command_on("evaluate", "runs/my cats", "data")
    "longtail evaluate 'runs/my cats' --root data"
    """
    return shlex.join(["longtail", name, str(run), *(["--root", root] if root else []), *more])


def clock(seconds: float) -> str:
    """Seconds as text.

    >>> clock(42), clock(75), clock(7500)
    ('42 s', '1 min 15 s', '2 h 05 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def visible(text: str) -> str:
    """Text in which control characters, and characters that a terminal cannot print, are escaped.

    >>> print(visible("cat" + chr(27) + "[2J"))
    cat\\x1b[2J
    """
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def markdown_text(text: str) -> str:
    """Text in a line of Markdown: its markup and HTML are escaped.

    >>> markdown_text("<b>a|b</b>")
    '&lt;b&gt;a\\\\|b&lt;/b&gt;'
    """
    line = " ".join(visible(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|!#~])", r"\\\1", line)


def table_cell(text: str) -> str:
    """Text in a cell of a CSV file: on one line, and escaped so that no spreadsheet program runs it as a formula.

    >>> table_cell("=1+2"), table_cell("cat"), table_cell("-1.5")
    ("'=1+2", 'cat', '-1.5')
    >>> print(table_cell("two" + chr(10) + "lines, a" + chr(9) + "tab"))
    two\\nlines, a\\ttab
    """
    plain = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return f"'{plain}" if plain.lstrip()[:1] in tuple("=+-@") and not isinstance(_value(plain), int | float) else plain


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The text of a CSV file, every cell of text as `table_cell` writes it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([table_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return text.getvalue()


def parse_options(options: dict[str, str], *functions: Callable[..., object]) -> list[dict[str, Any]]:
    """For each function the options that it takes, as values; `-` or `_` in names, an error lists the valid ones."""
    given = {"self", "backbone", "class_counts"}
    names = [[name for name in inspect.signature(function).parameters if name not in given] for function in functions]
    valid = dict.fromkeys(chain(*names))
    values = {choose("option", name.replace("-", "_"), valid): _value(text) for name, text in options.items()}
    return [{name: value for name, value in values.items() if name in of_function} for of_function in names]


def _value(text: str) -> object:
    """The value of a word: a number, True or False, None, or the word itself."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    for convert in (lambda word: words[word.lower()], int, float):
        with suppress(KeyError, ValueError):
            return convert(text)
    return text
