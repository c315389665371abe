"""How figures look: colours, type, and class names that fit and are read as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

BEFORE, AFTER, OTHER, COUNTS = "#8a8f98", "#d1495b", "#2e86ab", "#d9dde3"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.hashsalt": "longtail",
    "svg.fonttype": "none",
}
LONGEST = 18


@contextmanager
def drawing() -> Iterator[None]:
    """Our style while figures are made and written."""
    with mpl.rc_context(STYLE):
        yield


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics.

    >>> plain("$x$")
    '\\\\$x\\\\$'
    """
    return text.replace("$", r"\$")


def short(name: str) -> str:
    """A class name for a figure: whole if it fits, else its beginning.

    >>> short("goldfish"), short("soft-coated wheaten terrier")
    ('goldfish', 'soft-coated wheat…')
    """
    return plain(name if len(name) <= LONGEST else name[: LONGEST - 1] + "…")
