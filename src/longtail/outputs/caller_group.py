"""Which processes of the caller's process group make the same call at the same time.

Collective calls of `torch.distributed` wait for every process. If only one process called the library, it would wait
for ever. So the processes meet in the group's store before the first collective call. A process enters a meeting, or
gives up waiting, in one atomic step: either all take part or none of them does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from longtail.distributed import World, collective_seconds
from longtail.errors import UserError
from longtail.launch import POLL_SECONDS, joining_seconds, not_joined

KEY = "longtail/meeting"


class Meeting(NamedTuple):
    """The meeting that processes can enter now.

    Args:
        number: meetings in which all processes met before this one.
        waiting: ranks that wait in this one.
        busy: ranks that have not finished the work of the last one.
    """

    number: int = 0
    waiting: Sequence[int] = ()
    busy: Sequence[int] = ()

    def entered(self, rank: int, size: int) -> Meeting:
        waiting = sorted({*self.waiting, rank})
        if len(waiting) == size:
            return Meeting(self.number + 1, busy=waiting)
        return self.left(rank)._replace(waiting=waiting)

    def left(self, rank: int) -> Meeting:
        waiting, busy = ([other for other in ranks if other != rank] for ranks in (self.waiting, self.busy))
        return Meeting(self.number, waiting, busy)


@contextmanager
def taking_part(world: World, *, needed: str = "") -> Iterator[World]:
    """The processes that share the work of the block: all of the group, or only this one if no other makes the call.

    Args:
        needed: the reason why all processes must make the call; empty if one process can work alone.
    """
    if world.size == 1:
        yield world
        return
    store = dist.distributed_c10d._get_default_store()
    together = _meet(world, store, needed)
    try:
        yield world if together else World(0, 1, world.device)
    finally:
        if together:
            change(store, lambda now: now.left(world.rank))


def _meet(world: World, store: Any, needed: str) -> bool:
    """Whether all processes have met; otherwise this one may work alone."""
    number = change(store, lambda now: now.entered(world.rank, world.size)).number
    try:
        others = _wait(store, number)
    finally:  # give up, unless all have met by now
        last = change(store, lambda now: now.left(world.rank) if now.number == number else now)
    if last.number > number:
        return True
    others = (others | {*last.waiting}) - {world.rank}
    if not others and not needed:
        return False
    missing = min({*range(world.size)} - others - {world.rank} or {*range(world.size)} - {*last.waiting})
    why = needed or "some of the processes made this call, others did not"
    raise UserError(
        f"{not_joined(world.size)}: process {missing} has not made this call, says process {world.rank}; {why}: make "
        "the call on every process (LONGTAIL_JOIN_TIMEOUT sets how long to wait)"
    )


def _wait(store: Any, number: int) -> set[int]:
    """Wait until all have met or time is up; returns the ranks that were seen waiting.

    Time does not run while others finish the work of the last meeting.
    """
    seen: set[int] = set()
    started = idle_since = time.monotonic()
    while True:
        clock, meeting = time.monotonic(), change(store, lambda now: now)
        seen |= {*meeting.waiting}
        if meeting.busy and clock < started + collective_seconds():
            idle_since = clock
        if meeting.number > number or clock > idle_since + joining_seconds():
            return seen
        time.sleep(POLL_SECONDS)


def change(store: Any, edit: Callable[[Meeting], Meeting]) -> Meeting:
    """Change the meeting as it is now, whatever others do meanwhile; returns the meeting before."""
    text = store.compare_set(KEY, "", json.dumps(Meeting()))
    while True:
        before = Meeting(*json.loads(text))
        wanted = json.dumps(edit(before)).encode()
        if wanted == text:
            return before
        result = store.compare_set(KEY, text.decode(), wanted.decode())
        if result == wanted:
            return before
        text = result
