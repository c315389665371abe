"""The random numbers of the caller: code that runs in between leaves them as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """A block after which torch (on the CPU), numpy and Python draw what they would have drawn without it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
