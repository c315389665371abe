"""Numbers as people read them."""

from __future__ import annotations


def percent(value: float | None) -> str:
    """A share as people read it.

    >>> percent(0.4567), percent(None)
    ('45.7', 'none')
    """
    return "none" if value is None else f"{100 * value:.1f}"


def clock(seconds: float) -> str:
    """Seconds as people say them.

    >>> clock(42), clock(75), clock(7500)
    ('42 s', '1 min 15 s', '2 h 05 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
