"""What this machine has."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Default number of processes that decode images: more processes than cores would wait for each other.
WORKERS = min(4, usable_cores())
