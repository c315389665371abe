"""Conversions between torch and NumPy, and computing in at least single precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.core.mapped import MappedArray


def single_at_least(values: Tensor) -> Tensor:
    """Half precision is converted to single; single and double are not changed."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def plain(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, detached, in a type that NumPy supports."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def as_array(values: Any) -> np.ndarray:
    """Tensors and lists as arrays; arrays, also memory-mapped ones, are returned unchanged."""
    if isinstance(values, np.ndarray | MappedArray):
        return values  # type: ignore[return-value]  # it is read when it is indexed
    return plain(values).numpy() if isinstance(values, Tensor) else np.asarray(values)


def writable(values: np.ndarray | Tensor) -> Tensor:
    """A tensor that shares the memory of an array, or a copy if the array is read-only."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=("C", "W")))


def without_autocast(values: Tensor) -> AbstractContextManager[object]:
    """A block in which the device of `values` computes in the precision of its inputs."""
    kind = values.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
