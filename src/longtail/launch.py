"""How this process was started and how it ends: the environment variables and the store of torchrun, signals."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any

from longtail.errors import EXIT_TERMINATED, UserError

MAX_DIGITS = 9  # of any number of processes, ports or seconds
POLL_SECONDS = 0.05
PARENT_SECONDS = 0.5  # between two checks whether torchrun is still running
SILENT_SECONDS = 2.0  # a process that does not print the error exits later than the one that prints it


def env_number(name: str, default: int, *, at_least: int = 1) -> int:
    """An environment variable that holds a whole number; an empty one counts as unset."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) < at_least:
        raise UserError(
            f"environment variable {name} is {text!r}; unset it or set a whole number of at least {at_least}"
        )
    return int(text)


def join_timeout() -> int:
    """How long a process waits for the others to join."""
    return env_number("LONGTAIL_JOIN_TIMEOUT", 50)


def not_joined(size: int) -> str:
    """The message of a process that waited for others."""
    return f"not all of {size} processes joined within {join_timeout()} s"


def is_main_process() -> bool:
    """Whether this process prints: only rank 0 does."""
    return env_number("WORLD_SIZE", 1) == 1 or os.environ.get("RANK", "0") == "0"


def has_agent_store() -> bool:
    """Whether torchrun hosts the store; that store outlives this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def launcher_store() -> Any:
    """The store of `torch.distributed` of this launch, hosted by torchrun as long as it runs, otherwise by process 0.

    It stays open until the process exits, because others may still read from it.
    """
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    rank, size = env_number("RANK", 0, at_least=0), env_number("WORLD_SIZE", 1)
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=join_timeout()))))
    except ValueError as error:
        raise UserError(f"WORLD_SIZE says {size} processes, but {error}; start them with torchrun") from error
    except RuntimeError as error:
        raise UserError(f"{not_joined(size)} (process {rank})") from error
    return store


def launch_id() -> str | None:
    """An id of this launch of torchrun, the same after torchrun restarts its processes; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not has_agent_store():
        return f"{platform.node()}:{os.getppid()}"  # no store outlives the processes: identify the agent itself
    return str(launcher_store().compare_set("longtail/launch", "", uuid.uuid4().hex).decode())


def first_to_report(text: str) -> bool:
    """Whether this is the first process to report this text since the launch; the others wait a little."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    try:
        first = launcher_store().add(f"longtail/reported/{attempt}/{text}", 1) == 1
    except (RuntimeError, ValueError):
        return True  # the store cannot be reached: printing twice is better than never
    if not first:
        time.sleep(SILENT_SECONDS)
    return bool(first)


@cache
def exit_with_parent() -> None:
    """Exit when torchrun is gone, so that a new launch can replace this process. A second call does nothing."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        # Without cleaning up: the other processes hang in collective calls, and files are written atomically.
        line = "longtail: torchrun was killed, so its processes exit; start the command again"
        print(line, file=sys.stderr, flush=True)
        os._exit(EXIT_TERMINATED)

    if has_agent_store():
        threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def termination_signals() -> tuple[int, ...]:
    """The signals that end a process; SIGHUP is not among them under `nohup`, which lets it be ignored."""
    hangup = getattr(signal, "SIGHUP", None)  # not on every system
    if hangup is None or signal.getsignal(hangup) == signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGTERM, hangup)


@contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """A block in which signals go to a handler; in another thread than the main one nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
