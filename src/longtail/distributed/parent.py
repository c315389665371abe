"""Processes that torchrun started end when torchrun is gone, so that a new launch can replace them."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache

from longtail.distributed.environment import has_agent_store
from longtail.errors import EXIT_TERMINATED

LOOK_SECONDS = 0.5


@cache
def end_with_parent() -> None:
    """If torchrun started this process: watch torchrun, and exit when it is gone. A second call does nothing."""
    if has_agent_store():
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(LOOK_SECONDS)
    # Exit at once without cleaning up: the other processes hang in collective calls, and files are written atomically.
    print("longtail: torchrun was killed, so its processes exit; start the command again", file=sys.stderr, flush=True)
    os._exit(EXIT_TERMINATED)
