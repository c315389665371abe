"""The one exception for mistakes a user can mend, and the exit codes of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Something the caller can mend: the message says what is wrong, where, and what to do.

    The command line prints it as one line and exits with code 2; in Python it is a `ValueError`.
    """


def choose(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return `name` if it is valid, else raise an error that lists what is.

    >>> choose("sampler", "instnce", ["instance", "reversed"])
    Traceback (most recent call last):
    longtail.errors.UserError: unknown sampler 'instnce' (did you mean 'instance'?); choose from: instance, reversed
    """
    names = list(valid)
    if name in names:
        return name
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"unknown {kind} {name!r}{hint}; choose from: {', '.join(names)}")
