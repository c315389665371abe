"""Checks of the numbers a user gives to a network."""

from __future__ import annotations

import math

from longtail.errors import UserError


def number(name: str, value: object, *, least: float = -math.inf) -> float:
    """The value if it is a finite number of at least `least`.

    >>> number("gamma", "much", least=0)
    Traceback (most recent call last):
    longtail.errors.UserError: gamma must be a number of at least 0, not 'much'
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= least:
        return value
    bound = "" if least == -math.inf else f" of at least {least:g}"
    raise UserError(f"{name} must be a number{bound}, not {value!r}")


def positive_int(name: str, value: object) -> int:
    """The value if it is a whole number of at least 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
