"""Which processes of the caller's process group make the same call at the same time.

Collective calls of `torch.distributed` wait for every process. If only one process called the library, it would wait
for ever. So each process that makes the call writes a key to the group's store and looks for the keys of the others
before the first collective call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from longtail.distributed.store import POLL_SECONDS, joining_seconds, not_together
from longtail.distributed.world import World
from longtail.errors import UserError


def group_of_caller(device: torch.device) -> World:
    """The processes of the caller's process group, or this process alone."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), device)
    return World(0, 1, device)


@contextmanager
def taking_part(world: World, *, needed: str = "") -> Iterator[World]:
    """The processes that share the work of the block: all of the group, or only this one if no other makes the call.

    Args:
        needed: the reason why all processes must make the call; empty if one process can work alone.
    """
    if world.size == 1:
        yield world
        return
    store = _store()
    store.set(_key(world.rank), "here")
    try:
        yield _gathered(world, store, needed)
    finally:
        store.set(_key(world.rank), "gone")


def _gathered(world: World, store: Any, needed: str) -> World:
    deadline = time.monotonic() + joining_seconds()
    while True:
        missing = [rank for rank in range(world.size) if not _is_here(store, rank)]
        if not missing:
            return world
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    if len(missing) == world.size - 1 and not needed:
        store.set(_key(world.rank), "alone")  # a process that makes the call later must not wait for this one
        if not any(_is_here(store, rank) for rank in missing):
            return World(0, 1, world.device)
    why = needed or "some of the processes made this call, others did not"
    raise UserError(
        f"{not_together(world.size, f'process {missing[0]} has not made this call, says process {world.rank}')}; "
        f"{why}: make the call on every process (LONGTAIL_JOIN_TIMEOUT sets how long to wait)"
    )


def _is_here(store: Any, rank: int) -> bool:
    return bool(store.check([_key(rank)])) and store.get(_key(rank)) == b"here"


def _key(rank: int) -> str:
    return f"longtail/here/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
