"""Keeps the random state of the caller unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept() -> Iterator[None]:
    """A block that restores the random states of torch, NumPy and Python at its end."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    of_devices = torch.cuda.get_rng_state_all() if in_use else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)
