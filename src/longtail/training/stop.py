"""Stopping between two steps, when a signal arrives."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import torch

from longtail.core.signals import handling, terminations
from longtail.distributed.world import World


class StopRequest:
    """Turns Ctrl-C, the scheduler's SIGTERM and a closed terminal into a request to stop after the current step."""

    def __init__(self) -> None:
        self._asked = 0  # the number of the signal

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """A block in which signals are requests; in a thread other than the main one the caller stops training."""
        with handling(self._ask, signal.SIGINT, *terminations()):
            yield self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM

    def requested(self, world: World) -> int:
        """The signal that any process received; 0 if none."""
        if world.size == 1:
            return self._asked  # without waiting for the device
        counts = torch.zeros(2, device=world.device)
        if self._asked:
            counts[int(self._asked == signal.SIGTERM)] = 1
        interrupted, terminated = world.sum(counts).tolist()
        return signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0
