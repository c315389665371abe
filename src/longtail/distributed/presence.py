"""Which processes of the caller's process group make the same call at the same time.

Collective calls of `torch.distributed` wait for every process. If only one process called the library, it would wait
for ever. So the processes meet in the group's store before the first collective call. A process enters a meeting, or
gives up waiting, in one atomic step: either all take part or none of them does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from longtail.distributed.store import POLL_SECONDS, joining_seconds, not_together
from longtail.distributed.world import World, collective_seconds
from longtail.errors import UserError

KEY = "longtail/meeting"


@dataclass(frozen=True)
class Meeting:
    """The meeting that processes can enter now.

    Args:
        number: meetings in which all processes met before this one.
        waiting: processes that wait in this one.
        busy: processes that have not finished the work of the last one.
    """

    number: int = 0
    waiting: frozenset[int] = frozenset()
    busy: frozenset[int] = frozenset()

    def entered(self, rank: int, size: int) -> Meeting:
        waiting = self.waiting | {rank}
        if len(waiting) == size:
            return Meeting(self.number + 1, busy=waiting)
        return Meeting(self.number, waiting, self.busy - {rank})

    def left(self, rank: int) -> Meeting:
        return Meeting(self.number, self.waiting - {rank}, self.busy - {rank})

    def text(self) -> str:
        return json.dumps([self.number, sorted(self.waiting), sorted(self.busy)])

    @classmethod
    def read(cls, text: bytes) -> Meeting:
        number, waiting, busy = json.loads(text)
        return cls(number, frozenset(waiting), frozenset(busy))


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
    together = _meet(world, store, needed)
    try:
        yield world if together else World(0, 1, world.device)
    finally:
        if together:
            _change(store, lambda now: now.left(world.rank))


def _meet(world: World, store: Any, needed: str) -> bool:
    """Whether all processes have met; otherwise this one may work alone."""
    entered = _change(store, lambda now: now.entered(world.rank, world.size))
    try:
        seen = _wait(store, entered, world.rank)
    finally:  # give up, unless all have met by now
        last = _change(store, lambda now: now.left(world.rank) if now.number == entered.number else now)
    if last.number > entered.number:
        return True
    seen |= last.waiting
    if seen == {world.rank} and not needed:
        return False
    everyone = set(range(world.size))
    missing = min(everyone - seen or everyone - last.waiting)
    why = needed or "some of the processes made this call, others did not"
    raise UserError(
        f"{not_together(world.size, f'process {missing} has not made this call, says process {world.rank}')}; "
        f"{why}: make the call on every process (LONGTAIL_JOIN_TIMEOUT sets how long to wait)"
    )


def _wait(store: Any, entered: Meeting, rank: int) -> set[int]:
    """Wait until all have met or time is up; returns the processes that were seen waiting.

    Time does not run while others finish the work of the last meeting.
    """
    seen = {rank}
    started = idle_since = time.monotonic()
    while True:
        clock, meeting = time.monotonic(), _change(store, lambda now: now)
        if meeting.number > entered.number:
            return seen
        seen |= meeting.waiting
        if meeting.busy and clock < started + collective_seconds():
            idle_since = clock
        if clock > idle_since + joining_seconds():
            return seen
        time.sleep(POLL_SECONDS)


def _change(store: Any, change: Callable[[Meeting], Meeting]) -> Meeting:
    """Change the meeting as it is now, whatever others do meanwhile; returns the meeting before."""
    known = store.compare_set(KEY, "", Meeting().text())
    while True:
        before = Meeting.read(known)
        wanted = change(before).text().encode()
        if wanted == known:
            return before
        found = store.compare_set(KEY, known.decode(), wanted.decode())
        if found == wanted:
            return before
        known = found


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
