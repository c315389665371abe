"""The processes of one run: rank, size and the few exchanges between them.

Started plainly there is one process and every exchange is the identity; under `torchrun` they go
through `torch.distributed` (nccl on GPUs, gloo elsewhere).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.errors import UserError

TIMEOUT = timedelta(seconds=int(os.environ.get("LONGTAIL_TIMEOUT", "1800")))


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, on every process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def summed(tensor: Tensor) -> Tensor:
    """Sum in place over the processes that train together, where a module is not told of its `World`."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


ALONE = World(0, 1, torch.device("cpu"))


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Join the processes `torchrun` started, if it did, and leave them at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = find_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield World(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), size, chosen)
    finally:
        dist.destroy_process_group()


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is the fastest device there is; `cuda` means this process's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; use auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available here; use --device cpu or auto")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank)
    return device
