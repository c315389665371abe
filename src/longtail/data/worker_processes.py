"""Work on images in worker processes: results in order, errors as one line instead of a traceback."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from longtail.core.signals import terminations
from longtail.errors import UserError

GRACE_SECONDS = 120  # that a worker lives on after SIGTERM


def in_order_of(
    work: Dataset[Any],
    keys: Iterable[Any],
    workers: int,
    *,
    pin: bool = False,
    collate: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """`work[key]` for every key, computed by `workers` processes (0: by this one).

    `work` returns a `UserError` as a value, which is raised here: raised in a worker it would come back as a traceback.
    """
    with warnings.catch_warnings():
        # More workers than cores can be useful when files are slow to read.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            pin_memory=pin,
            collate_fn=collate,
            worker_init_fn=_outlive_signals,
        )
    for result in loader:
        if isinstance(result, UserError):
            raise result
        yield result


def _outlive_signals(number: int) -> None:
    """In a worker: ignore signals to the whole process group, because the parent needs its workers until it has saved.

    `timeout` and schedulers send SIGTERM to every process of a group; a terminal sends Ctrl-C, and SIGHUP at its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        for ending in terminations():
            signal.signal(ending, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(GRACE_SECONDS)
