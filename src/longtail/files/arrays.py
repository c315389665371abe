"""Conversions between torch and NumPy, and computing in at least single precision."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor


def single_at_least(values: Tensor) -> Tensor:
    """Half precision is converted to single; single and double are not changed."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def plain(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, detached, in a type that NumPy supports."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def as_array(values: Any) -> np.ndarray:
    """Tensors and lists as arrays; arrays, also memory-mapped ones, are returned unchanged."""
    if isinstance(values, np.ndarray):
        return values
    return plain(values).numpy() if isinstance(values, Tensor) else np.asarray(values)


def writable(values: np.ndarray | Tensor) -> Tensor:
    """A tensor that shares the memory of an array, or a copy if the array is read-only."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=("C", "W")))


def without_autocast(values: Tensor) -> AbstractContextManager[object]:
    """A block in which the device of `values` computes in the precision of its inputs."""
    kind = values.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


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
