"""Stopping between two steps, when a signal arrives."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import torch

from longtail.distributed.world import World


class StopRequest:
    """Turns Ctrl-C and the scheduler's SIGTERM into a request to stop after the current step."""

    def __init__(self) -> None:
        self._asked = 0  # the number of the signal

    def __enter__(self) -> Self:
        # Only the main thread may set handlers; elsewhere the caller stops training its own way.
        in_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = number

    def requested(self, world: World) -> int:
        """The signal that any process received; 0 if none."""
        if world.size == 1:
            return self._asked  # without waiting for the device
        counts = torch.zeros(2, device=world.device)
        if self._asked:
            counts[int(self._asked == signal.SIGTERM)] = 1
        interrupted, terminated = world.sum(counts).tolist()
        return signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0
