"""The one exception for mistakes a user can mend, and the exit codes of the command line."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = f"Exit codes: 0 done, {EXIT_USER_ERROR} something to mend in the input, {EXIT_INTERRUPTED} interrupted."

_BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


class UserError(ValueError):
    """Something the caller can mend: the message says what is wrong, where, and what to do.

    The command line prints it as one line and exits with code 2; in Python it is a `ValueError`.
    """


class ReportedElsewhere(UserError):
    """A mistake that another of the processes that work together says: this one only stops."""


def choose(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return `name` if it is valid, else raise an error that lists what is.

    >>> choose("sampler", "instnce", ["instance", "reversed"])
    Traceback (most recent call last):
    longtail.errors.UserError: unknown sampler 'instnce' (did you mean 'instance'?); choose from: instance, reversed
    """
    names = list(valid)
    if name in names:
        return name
    close = get_close_matches(str(name), names, n=1, cutoff=0.7)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"unknown {kind} {name!r}{hint}; choose from: {', '.join(names)}")


def number(name: str, value: Any, **bounds: float) -> float:
    """A setting as a number within bounds: `above`, `at_least`, `below`, `at_most`.

    >>> number("beta", 1, at_least=0, below=1)
    Traceback (most recent call last):
    longtail.errors.UserError: beta must be a number, at least 0 and below 1, not 1
    """
    usable = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not usable or not all(_BOUNDS[kind](value, bound) for kind, bound in bounds.items()):
        wanted = " and ".join(f"{kind.replace('_', ' ')} {bound:g}" for kind, bound in bounds.items())
        raise UserError(f"{name} must be a number, {wanted or 'finite'}, not {value!r}")
    return float(value)


def whole_number(name: str, value: Any, *, at_least: int = 1) -> int:
    """A setting that counts something."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise UserError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
    return int(value)
