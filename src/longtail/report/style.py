"""The style of figures: colours, fonts, and class names that fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.font_manager import get_font_names

BEFORE, AFTER, OTHER, THIRD, COUNTS = "#8a8f98", "#d1495b", "#2e86ab", "#3d7a4f", "#d9dde3"
GAIN = "#3a7d44"
# Fallback fonts for letters that the first font does not have.
ASIAN = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Droid Sans Fallback",
)
STYLE: dict[Any, Any] = {
    # Only installed fonts: matplotlib warns about each of the others.
    "font.family": ["sans-serif", *sorted({*ASIAN} & {*get_font_names()}, key=ASIAN.index)],
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
    """Applies the style while figures are drawn and written."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A letter that no installed font has is drawn as a box; a warning for each letter adds nothing.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


def plain(text: str) -> str:
    """Text in which matplotlib does not read `$` as mathematics.

    >>> plain("$x$")
    '\\\\$x\\\\$'
    """
    return text.replace("$", r"\$")


def short(name: str) -> str:
    """A class name for a figure: the whole name if it fits, otherwise its beginning and its end.

    >>> short("goldfish"), short("great spotted woodpecker 12")
    ('goldfish', 'great spo…ecker 12')
    """
    return plain(name if len(name) <= LONGEST else name[: LONGEST // 2] + "…" + name[1 - LONGEST // 2 :])


def slant(names: list[str], degrees: float) -> dict[str, Any]:
    """Options of tick labels: rotated, unless the names are short enough to fit side by side."""
    return {} if max(map(len, names)) < 3 else {"rotation": degrees, "ha": "right", "rotation_mode": "anchor"}
