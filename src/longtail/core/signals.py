"""Signals that ask a process to end: SIGTERM of a scheduler, SIGHUP of a terminal that was closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def terminations() -> tuple[int, ...]:
    """The signals that end a process; SIGHUP is not among them under `nohup`, which lets it be ignored."""
    hangup = getattr(signal, "SIGHUP", None)  # not on every system
    if hangup is None or signal.getsignal(hangup) == signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGTERM, hangup)


@contextmanager
def handling(handler: Handler, *numbers: int) -> Iterator[None]:
    """A block in which signals go to a handler; in another thread than the main one nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
