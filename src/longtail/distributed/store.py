"""The store of `torch.distributed`: messages between processes outside of collective calls.

torchrun hosts the store as long as it runs, so the store outlives processes that torchrun restarts. Without
torchrun, process 0 hosts it.
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
SILENT_SECONDS = 2.0  # a process that does not print the error exits later than the one that prints it
POLL_SECONDS = 0.05


@cache
def connect(rank: int, size: int) -> Any:
    """The store. It stays open until the process exits, because others may still read from it."""
    patience = timedelta(seconds=joining_seconds())
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=patience)))
    except ValueError as error:
        raise UserError(f"WORLD_SIZE says {size} processes, but {error}; start them with torchrun") from error
    except RuntimeError as error:
        raise UserError(not_together(size, f"says process {rank}")) from error
    return store


def launch_id() -> str | None:
    """An id of this launch of torchrun, the same after torchrun restarts its processes; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not has_agent_store():
        return f"{platform.node()}:{os.getppid()}"  # no store outlives the processes: identify the agent itself
    return str(_agent_store().compare_set("longtail/launch", "", uuid.uuid4().hex).decode())


def first_to_say(text: str) -> bool:
    """Whether this is the first process to report this text since the launch; the others wait a little."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    try:
        first = _agent_store().add(f"longtail/said/{attempt}/{text}", 1) == 1
    except (RuntimeError, ValueError):
        return True  # the store cannot be reached: printing twice is better than never
    if not first:
        time.sleep(SILENT_SECONDS)
    return bool(first)


def _agent_store() -> Any:
    return connect(number_of("RANK", 0, at_least=0), number_of("WORLD_SIZE", 1))


def joining_seconds() -> int:
    """How long a process waits for the others to join."""
    return number_of("LONGTAIL_JOIN_TIMEOUT", JOINING_SECONDS)


def not_together(size: int, more: str) -> str:
    """The message of a process that waited for others that did not join."""
    return f"not all of {size} processes joined within {joining_seconds()} s: {more}"
