"""Environment variables: the rank of this process among several, and how long it waits for the others."""

from __future__ import annotations

import os

from longtail.errors import UserError

MOST_DIGITS = 9  # of any number of processes, ports or seconds


def number_of(name: str, default: int, *, at_least: int = 1) -> int:
    """An environment variable that holds a whole number; an empty one counts as unset."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < at_least:
        raise UserError(
            f"environment variable {name} is {text!r}; unset it or set a whole number of at least {at_least}"
        )
    return int(text)


def has_agent_store() -> bool:
    """Whether torchrun hosts the store; that store outlives this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_main_process() -> bool:
    """Whether this process prints: only rank 0 does."""
    return number_of("WORLD_SIZE", 1) == 1 or os.environ.get("RANK", "0") == "0"
