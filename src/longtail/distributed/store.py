"""The store of `torch.distributed`: what processes tell each other outside of exchanges.

torchrun keeps it, for as long as it runs: it outlives the processes that it starts again. Without
torchrun process 0 does.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import rendezvous  # type: ignore[attr-defined]

from longtail.distributed.environment import has_agent_store, number_of
from longtail.errors import UserError

JOINING_SECONDS = 50
SILENT_SECONDS = 2.0  # a process that says nothing ends later than the one that speaks
POLL_SECONDS = 0.05


@cache
def connect(rank: int, size: int) -> Any:
    """The store, kept for as long as the process lives: others may still read from it."""
    patience = timedelta(seconds=joining_seconds())
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=patience)))
    except ValueError as error:
        raise UserError(f"WORLD_SIZE says {size} processes, but {error}; start them with torchrun") from error
    except RuntimeError as error:
        raise UserError(not_together(size, f"says process {rank}")) from error
    return store


def launch_id() -> str | None:
    """What stays the same when torchrun starts its processes again, and no other launch has; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not has_agent_store():
        return f"{platform.node()}:{os.getppid()}"  # no store outlives the processes: the agent itself
    return str(_agent_store().compare_set("longtail/launch", "", uuid.uuid4().hex).decode())


def first_to_say(text: str) -> bool:
    """Whether no other process has said this since torchrun started them; who comes later waits a little."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    try:
        first = _agent_store().add(f"longtail/said/{attempt}/{text}", 1) == 1
    except (RuntimeError, ValueError):
        return True  # the store cannot be reached: better twice than never
    if not first:
        time.sleep(SILENT_SECONDS)
    return bool(first)


def _agent_store() -> Any:
    return connect(number_of("RANK", 0, at_least=0), number_of("WORLD_SIZE", 1))


def joining_seconds() -> int:
    """How long a process waits for the others to come."""
    return number_of("LONGTAIL_JOIN_TIMEOUT", JOINING_SECONDS)


def not_together(size: int, more: str) -> str:
    """What a process says that waited in vain."""
    return f"not all of {size} processes came together within {joining_seconds()} s: {more}"
