"""Rendezvous of the processes of a run: they check that they run the same code and settings, and share errors.

This uses the store of `torch.distributed`, not its collective calls, so that a process can report an error while
the others wait for it in a collective call. The first process that fails writes its reason to the store. The
others notice that it is gone, read the reason and stop with it. One of them prints it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longtail.distributed.store import POLL_SECONDS, SILENT_SECONDS, connect, joining_seconds, not_together
from longtail.errors import ReportedElsewhere, UserError

REASON_SECONDS = 5.0  # how long a process waits for the reason after another process is gone
LEAVING_SECONDS = 10.0  # how long the process that hosts the store waits for the others to leave


class Rendezvous:
    """One rendezvous of `size` processes; processes can meet several times, one rendezvous after another.

    The store of torchrun outlives the processes, so every rendezvous uses its own keys, under a name that
    process 0 chooses. Each process writes a new random mark. Process 0 publishes the list of marks, its own
    first. A process that finds its mark in the list has found the name.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.expected = size  # how many processes will leave at the end
        self._lobby = dist.PrefixStore("longtail", connect(rank, size))  # type: ignore[attr-defined]
        mark = uuid.uuid4().hex
        self._lobby.set(f"here{rank}", mark)
        name = mark if rank == 0 else self._find_name(mark)
        self.store: Any = dist.PrefixStore(name, self._lobby)  # type: ignore[attr-defined]

    def _find_name(self, mark: str) -> str:
        deadline = time.monotonic() + joining_seconds()
        with suppress(RuntimeError):  # raised if the store is gone, and process 0 with it
            while time.monotonic() < deadline:
                if self._lobby.check(["list"]) and mark in (listed := json.loads(self._lobby.get("list"))):
                    return str(listed[0])
                time.sleep(POLL_SECONDS)
        raise UserError(not_together(self.size, f"process 0 is missing, says process {self.rank}"))

    def require_alike(self, own: dict[str, str]) -> None:
        """Raise on all processes unless all give the same values; an entry "error" raises by itself."""
        self.store.set(f"process{self.rank}", json.dumps(own))
        if self.rank == 0:
            self.store.set("verdict", self._gather() or self._compare() or "alike")
        # Process 0 began to wait before this process was on its list, so its verdict arrives in time.
        verdict = self._wait_for("verdict", joining_seconds() + REASON_SECONDS)
        if verdict is None:
            raise UserError(not_together(self.size, "process 0 is missing"))
        if verdict != "alike":
            raise UserError(verdict) if self.rank == 0 else ReportedElsewhere(verdict)

    def _gather(self) -> str | None:
        """Publish the list until all processes have joined; returns an error message if some do not."""
        deadline = time.monotonic() + joining_seconds()
        while True:
            here = [f"here{rank}" for rank in range(self.size) if self._lobby.check([f"here{rank}"])]
            self._lobby.set("list", json.dumps([self._lobby.get(key).decode() for key in here]))
            missing = [rank for rank in range(self.size) if not self.store.check([f"process{rank}"])]
            if not missing:
                return None
            if time.monotonic() > deadline:
                self.expected -= len(missing)
                return not_together(self.size, f"process {missing[0]} is missing")
            time.sleep(POLL_SECONDS)

    def _compare(self) -> str | None:
        given = [json.loads(self.store.get(f"process{rank}")) for rank in range(self.size)]
        for rank, values in enumerate(given):
            if "error" in values:
                return f"{values['error']} (process {rank})"
            changed = sorted(name for name in given[0] | values if given[0].get(name) != values.get(name))
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                return (
                    f"process {rank} runs different code from process 0 ({changed[0]}{more}); "
                    "install the same version everywhere"
                )
        return None

    def explain(self, error: Exception) -> Exception:
        """The error to raise: this one, after reporting it to the others, or the reason another process reported."""
        if isinstance(error, ReportedElsewhere):
            return error
        try:
            if not _from_a_lost_neighbour(error):
                return self._tell(error)
            reason = self._wait_for("reason", REASON_SECONDS)
        except RuntimeError:
            reason = None  # the store is gone, and with it the process that hosted it
        if reason is None:
            return UserError("another process ended without reporting a reason: it was killed, or its machine was lost")
        return ReportedElsewhere(reason)

    def _tell(self, error: Exception) -> Exception:
        if not isinstance(error, UserError):
            if self.store.add("failures", 1) == 1:
                self.store.set("reason", f"{type(error).__name__}: {error} (process {self.rank})")
            return error
        text = str(error) if re.search(r"\bprocess \d", str(error)) else f"{error} (process {self.rank})"
        if self.store.add("failures", 1) > 1:
            return ReportedElsewhere(text)  # an error that all processes raise is printed once
        self.store.set("reason", text)
        return UserError(text)

    def leave(self, error: Exception | None) -> None:
        """Wait for the other processes, if this one hosts the store that they still read."""
        try:
            gone = self.store.add("left", 1)
            deadline = time.monotonic() + LEAVING_SECONDS
            while self.rank == 0 and gone < self.expected and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                gone = self.store.add("left", 0)
        except RuntimeError:
            return  # nobody is left to wait for
        if isinstance(error, ReportedElsewhere):
            time.sleep(SILENT_SECONDS)

    def _wait_for(self, key: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return self.store.get(key).decode()


def _from_a_lost_neighbour(error: Exception) -> bool:
    """Whether an error comes from a collective call whose other side is gone."""
    if isinstance(error, UserError) or not isinstance(error, RuntimeError):
        return False
    words = ("closed by peer", "reset by peer", "Broken pipe", "gloo", "NCCL", "TCPStore", "Timed out waiting")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def code_fingerprint() -> dict[str, str]:
    """A hash of every source file of this package, and the versions of torch and Python."""
    package = Path(__file__).parents[1]
    files = {
        path.relative_to(package.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.rglob("*.py"))
    }
    return {**files, "torch": str(torch.__version__), "Python": platform.python_version()}


def differing(values: list[dict[str, Any]]) -> str | None:
    """The first process whose values differ from those of process 0, and how: 'process 1 …(lr: 0.1 → 0.2)'."""
    first = values[0]
    for rank, own in enumerate(values):
        changed = [f"{name}: {first.get(name)} → {own.get(name)}" for name in first if first.get(name) != own.get(name)]
        if changed:
            return f"process {rank} was started differently from process 0 ({'; '.join(changed)})"
    return None
