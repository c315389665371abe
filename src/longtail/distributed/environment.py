"""What the environment says: which of several processes this one is, and how long it waits for the others."""

from __future__ import annotations

import os

from longtail.errors import UserError


def number_of(name: str, default: int, *, at_least: int = 1) -> int:
    """A variable that counts something; an empty one is as good as none."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < at_least:
        raise UserError(f"{name} is {text!r} in the environment; unset it or give a whole number from {at_least} on")
    return int(text)


def has_agent_store() -> bool:
    """Whether torchrun, which outlives this process, keeps a store for it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_main_process() -> bool:
    """Whether this process prints: of those that work together only the first."""
    return number_of("WORLD_SIZE", 1) == 1 or os.environ.get("RANK", "0") == "0"
