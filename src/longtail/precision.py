"""Where half precision is not enough."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def single_at_least(values: Tensor) -> Tensor:
    """Half precision becomes single; single and double stay."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def without_autocast(values: Tensor) -> AbstractContextManager[object]:
    """A block in which the device of `values` computes in the precision of its inputs."""
    kind = values.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
