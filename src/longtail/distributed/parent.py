"""Processes that torchrun started end when it is gone: its relaunch takes their place."""

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
    """Watch the process that started this one, where that is torchrun; called again, this does nothing."""
    if has_agent_store():
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(LOOK_SECONDS)
    # At once and without cleaning up, as if killed too: the others hang in exchanges, and files appear whole anyway.
    print("longtail: torchrun is gone, so its processes end; start the same command again", file=sys.stderr, flush=True)
    os._exit(EXIT_TERMINATED)
