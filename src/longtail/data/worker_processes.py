"""Work on images in worker processes: results in order, errors as one line instead of a traceback."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from longtail.core.signals import terminations
from longtail.errors import UserError

GRACE_SECONDS = 120  # that a worker lives on after SIGTERM


@contextmanager
def quiet_about_workers() -> Iterator[None]:
    """Without torch's warning about more workers than cores, which are useful when files are slow to read.

    torch gives it when a loader is made, where a user's own loader is warned about once, and whenever one is read.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


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
    with quiet_about_workers():
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            pin_memory=pin,
            collate_fn=collate,
            worker_init_fn=_outlive_signals,
        )
    with quiet_about_workers():
        results = iter(loader)
    for result in results:
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
