"""The processes of one run: rank, size and the few collective calls between them.

Without `torchrun` there is one process, and every collective call is the identity. With `torchrun`, the calls use
`torch.distributed` (nccl on GPUs, gloo elsewhere).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.distributed.environment import number_of
from longtail.distributed.parent import end_with_parent
from longtail.distributed.rendezvous import Rendezvous, code_fingerprint, differing
from longtail.errors import UserError

TIMEOUT = 1800


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

    def share(self, size: int) -> tuple[int, int]:
        """This process's share of `size` rows: its first row, and its last row (exclusive)."""
        return size * self.rank // self.size, size * (self.rank + 1) // self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            # nccl works on GPU tensors only, and the sums of the solvers are on the CPU.
            away = tensor.device.type == "cpu" and dist.get_backend() == "nccl"
            exchanged = tensor.to(self.device) if away else tensor
            dist.all_reduce(exchanged)
            if away:
                tensor.copy_(exchanged)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, on every process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of rank 0 to every process, in place."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, 0)

    def require_alike(self, **settings: Any) -> None:
        """Raise on all processes unless all were started with the same settings."""
        difference = differing(self.gather(settings))
        if difference:
            raise UserError(difference)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def summed(tensor: Tensor) -> Tensor:
    """Sum in place over the processes that train together, for modules that do not know their `World`."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


SINGLE_PROCESS = World(0, 1, torch.device("cpu"))


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Join the process group of `torchrun`, if there is one, and leave it at the end.

    If one process fails, all stop with its error. A process group that the caller has already initialised is
    used as it is.
    """
    size = number_of("WORLD_SIZE", 1)
    local_rank = number_of("LOCAL_RANK", 0, at_least=0)
    if dist.is_available() and dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), find_device(device, local_rank))
        return
    if size == 1:
        yield World(0, 1, find_device(device, local_rank))
        return
    rank, timeout = _own_rank(size), timedelta(seconds=collective_seconds())
    end_with_parent()
    rendezvous = Rendezvous(rank, size)
    failure: Exception | None = None
    try:
        chosen = _meet(rendezvous, device, local_rank, timeout)
        yield World(rank, size, chosen)
    except Exception as error:
        failure = rendezvous.explain(error)
        if failure is error:
            raise
        raise failure from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        rendezvous.leave(failure)


def _own_rank(size: int) -> int:
    text = os.environ.get("RANK", "")
    if not text.isdecimal() or int(text) >= size:
        raise UserError(f"WORLD_SIZE says {size} processes, but RANK is {text!r}; start them with torchrun")
    return int(text)


def _meet(rendezvous: Rendezvous, device: str, local_rank: int, timeout: timedelta) -> torch.device:
    """Check that all processes are alike, then initialise the group; returns the device of this process."""
    try:
        chosen, own = find_device(device, local_rank), code_fingerprint()
    except UserError as error:
        chosen, own = torch.device("cpu"), {"error": str(error)}
    rendezvous.require_alike(own)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=rendezvous.store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=timeout
    )
    return chosen


def collective_seconds() -> int:
    """After how many seconds a collective call gives up."""
    return number_of("LONGTAIL_TIMEOUT", TIMEOUT)


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is the fastest available device; `cuda` is this process's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; use auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use --device cpu or auto")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank)
    return device
