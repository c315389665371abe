"""The exception for mistakes that a user can correct, the exceptions that stop a command, and the exit codes."""

from __future__ import annotations

import math
import operator
import signal
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

EXIT_USER_ERROR = 2
EXIT_SIGNAL = 128  # plus the number of the signal, as in shells
EXIT_INTERRUPTED = EXIT_SIGNAL + signal.SIGINT
EXIT_TERMINATED = EXIT_SIGNAL + signal.SIGTERM
EXIT_CODES = (
    f"Exit codes: 0 done, {EXIT_USER_ERROR} invalid input, {EXIT_INTERRUPTED} interrupted, "
    f"{EXIT_TERMINATED} terminated."
)

MAX_CHARACTERS = 1200  # of a message
LARGEST = 2**63 - 1  # the largest whole number that every library we call accepts
_BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


class UserError(ValueError):
    """A mistake that the caller can correct: the message says what is wrong, where, and what to do.

    The command line prints it as one line and exits with code 2; in Python it is a `ValueError`. A message may quote a
    file, so the middle of a very long message is left out.
    """

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > MAX_CHARACTERS:
            text = f"{text[: MAX_CHARACTERS // 2]} … {text[-MAX_CHARACTERS // 2 :]}"
        super().__init__(text)


class ReportedElsewhere(UserError):
    """An error that another process of the group reports; this process only stops."""


class Interrupted(Exception):
    """A signal stopped training, and the checkpoint is written."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        super().__init__(step, number)
        self.step = step
        self.signal = number

    def __str__(self) -> str:
        return f"stopped after step {self.step}"


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived in a command that saves no state: unfinished files are removed, as after Ctrl-C."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, NumPy or torch means that there is not enough memory.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without its import
        return True
    phrases = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def choose(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return `name` if it is valid; otherwise raise an error that lists the valid names.

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
    try:
        usable = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of more than 300 digits
        usable = False
    if not usable or not all(_BOUNDS[kind](value, bound) for kind, bound in bounds.items()):
        wanted = " and ".join(f"{kind.replace('_', ' ')} {bound:g}" for kind, bound in bounds.items())
        raise UserError(f"{name} must be a number, {wanted or 'finite'}, not {value!r}")
    return float(value)


def whole_number(name: str, value: Any, *, at_least: int = 1, at_most: int = LARGEST) -> int:
    """A setting as a whole number within bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise UserError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
    if int(value) > at_most:
        raise UserError(f"{name} must be a whole number of at most {at_most:,}, not {value!r}")
    return int(value)
