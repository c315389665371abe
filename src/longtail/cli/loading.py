"""Imports of large libraries: the garbage collector rests meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import libraries in this block without collecting garbage.

    They make hundreds of thousands of objects and nothing to free, and the collector would look through them again and
    again. In a process that has just started they are kept out of later collections, too.
    """
    starting, collecting = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if starting:
            gc.freeze()
        if collecting:
            gc.enable()
