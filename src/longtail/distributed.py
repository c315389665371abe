"""Several processes that work together, on top of `torch.distributed` (nccl on GPUs, gloo elsewhere).

`join` opens a process group for the processes of torchrun; without torchrun there is one process, and every collective
call is the identity. Before the group is opened, the processes compare code and devices in the store of
`torch.distributed`. The store also carries errors: a process that fails writes its reason there and leaves. The others
notice in their next collective call that it is gone, read the reason and stop; one of them prints it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from longtail.errors import ReportedElsewhere, UserError
from longtail.launch import (
    POLL_SECONDS,
    SILENT_SECONDS,
    env_number,
    exit_with_parent,
    join_timeout,
    launcher_store,
    not_joined,
)

REASON_SECONDS = 5.0  # how long a process waits for the reason after another process is gone
LEAVING_SECONDS = 10.0  # how long the process that hosts the store waits for the others to leave


def collective_timeout() -> int:
    """After how many seconds a collective call gives up."""
    return env_number("LONGTAIL_TIMEOUT", 1800)


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
        _require_equal(self.gather(settings))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def _require_equal(settings: list[dict[str, Any]]) -> None:
    """Raise unless the settings of all processes, by rank, are equal."""
    first = settings[0]
    for rank, other in enumerate(settings):
        changed = [f"{name}: {first[name]} → {other.get(name)}" for name in first if first[name] != other.get(name)]
        if changed:
            raise UserError(f"process {rank} was started differently from process 0 ({'; '.join(changed)})")


SINGLE_PROCESS = World(0, 1, torch.device("cpu"))


def group_of_caller(device: torch.device) -> World:
    """The processes of the caller's process group, or this process alone."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), device)
    return World(0, 1, device)


def summed(tensor: Tensor) -> Tensor:
    """Sum in place over the processes that train together, for modules that do not have their `World`."""
    return group_of_caller(tensor.device).sum(tensor)


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is the fastest available device; `cuda` is the GPU of this process."""
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


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Join the process group of `torchrun`, if there is one, and leave it at the end.

    If one process fails, all stop with its error. A process group that the caller has already initialised is
    used as it is.
    """
    size = env_number("WORLD_SIZE", 1)
    local_rank = env_number("LOCAL_RANK", 0, at_least=0)
    if (dist.is_available() and dist.is_initialized()) or size == 1:
        yield group_of_caller(find_device(device, local_rank))
        return
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal() or int(rank) >= size:
        raise UserError(f"WORLD_SIZE says {size} processes, but RANK is {rank!r}; start them with torchrun")
    join_timeout(), collective_timeout()  # a variable that cannot be read is named before anything waits
    exit_with_parent()
    session = _Session(int(rank), size)
    failure: Exception | None = None
    try:
        yield session.open_group(device, local_rank)
    except Exception as error:
        failure = session.explain(error)
        if failure is error:
            raise
        raise failure from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        session.leave(failure)


_session_numbers = itertools.count()


class _Session:
    """The processes from `join` to its end, with a store that process 0 hosts for them.

    The store of torchrun outlives processes that are restarted, and would show what earlier ones wrote. Only the
    address of the new store is written there; the address of an earlier process 0 does not accept connections any more.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.store = self._open_store(f"longtail/session{next(_session_numbers)}")

    def _open_store(self, key: str) -> Any:
        launcher, host = launcher_store(), os.environ["MASTER_ADDR"]
        if self.rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            launcher.set(key, str(store.port))
            return store
        deadline = time.monotonic() + join_timeout()
        while time.monotonic() < deadline:
            try:
                port = int(launcher.get(key))
                return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=1))
            except RuntimeError:  # process 0 has not come yet, or this is the address of an earlier one
                time.sleep(POLL_SECONDS)
        raise UserError(f"{not_joined(self.size)}: process 0 is missing")

    def open_group(self, device: str, local_rank: int) -> World:
        """Wait for all processes, check that they run the same code, and initialise the process group."""
        try:
            chosen, problem = find_device(device, local_rank), None
        except UserError as error:
            chosen, problem = torch.device("cpu"), error
        description = {"code": _code_hash(), "torch": str(torch.__version__), "Python": platform.python_version()}
        description["device"] = str(problem or chosen.type)
        self.store.set(f"joined{self.rank}", json.dumps(description))
        keys = [f"joined{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=join_timeout()))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise UserError(f"{not_joined(self.size)}: process {missing[0]} is missing") from error
        _require_equal([json.loads(self.store.get(key)) for key in keys])
        if problem:
            raise problem
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=collective_timeout()),
        )
        return World(self.rank, self.size, chosen)

    def explain(self, error: Exception) -> Exception:
        """The error to raise: this one, after reporting it to the others, or the reason another process reported."""
        try:
            if not _is_lost_connection(error):
                return self._report(error)
            self.store.wait(["reason"], timedelta(seconds=REASON_SECONDS))
            return ReportedElsewhere(self.store.get("reason").decode())
        except RuntimeError:  # no reason, or the store is gone, and with it the process that hosted it
            return UserError("another process ended without reporting a reason: it was killed, or its machine was lost")

    def _report(self, error: Exception) -> Exception:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not re.search(r"\bprocess \d", text):
            text += f" (process {self.rank})"
        is_first = self.store.add("failures", 1) == 1
        if is_first:
            self.store.set("reason", text)
        if not isinstance(error, UserError):
            return error
        return UserError(text) if is_first else ReportedElsewhere(text)  # an error of all processes is printed once

    def leave(self, failure: Exception | None) -> None:
        """Wait for the other processes, if this one hosts the store that they still read."""
        try:
            self.store.add("left", 1)
            joined = sum(self.store.check([f"joined{rank}"]) for rank in range(self.size))
            deadline = time.monotonic() + LEAVING_SECONDS
            while self.rank == 0 and self.store.add("left", 0) < joined and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            return  # nobody is left to wait for
        if isinstance(failure, ReportedElsewhere):
            time.sleep(SILENT_SECONDS)


def _code_hash() -> str:
    """A hash of the source files of this package."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _is_lost_connection(error: Exception) -> bool:
    """Whether an error comes from a collective call whose other side is gone."""
    words = ("closed by peer", "reset by peer", "Broken pipe", "gloo", "NCCL", "TCPStore", "Timed out waiting")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
