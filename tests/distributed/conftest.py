"""Starting several processes: through torchrun, or each by hand with its own surroundings."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HANGING_SECONDS = 600.0  # longer than any busy machine needs: after that nothing will happen any more
SOURCE = Path(__file__).resolve().parents[2] / "src"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a process: our source, one thread, no trace of other launchers."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "TORCHELASTIC"))}
    return {**mine, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **more}


def torchrun_command(*words: object, processes: int = 2) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    return [*start, f"--master-port={free_port()}", *map(str, words)]


def workers_of(agent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


@pytest.fixture(scope="session")
def torchrun():
    """`torchrun(words…)` runs two processes and returns what they printed; an error if that is not `expect`."""

    def run(*words: object, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        env = surroundings(PYTHONFAULTHANDLER="1", **environment)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = subprocess.Popen(torchrun_command(*words), env=env, **pipes)
        try:
            stdout, stderr = started.communicate(timeout=HANGING_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (*workers_of(started.pid), started.pid):
                os.kill(pid, signal.SIGABRT)  # each says where it was
            raise AssertionError(f"still running after {HANGING_SECONDS} s:\n{started.communicate()[1]}") from None
        assert started.returncode == expect, stderr
        return subprocess.CompletedProcess(started.args, started.returncode, stdout, stderr)

    return run


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGING_SECONDS
    while not done():
        assert time.monotonic() < deadline, f"still running after {HANGING_SECONDS} s"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def by_hand():
    """`by_hand(first, second)` starts the processes of one run, each given as (words, environment, folder)."""

    def run(*ranks: tuple[list[object], dict[str, str], Path]) -> list[tuple[int, str]]:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(ranks))}
        shared["LONGTAIL_JOIN_TIMEOUT"] = "150"  # a busy machine may take long to start Python
        printed = [tempfile.TemporaryFile("w+") for _ in ranks]  # noqa: SIM115 — closed below, after the processes
        started = [
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=surroundings(**{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}),
                cwd=folder,
                stderr=printed[rank],
            )
            for rank, (words, environment, folder) in enumerate(ranks)
        ]
        try:
            wait_until(lambda: any(process.poll() is not None for process in started))
            wait_until(lambda: all(process.poll() is not None for process in started))
        finally:
            for process in started:
                process.kill()
                process.wait()
            for file in printed:
                file.seek(0)
            texts = [file.read() for file in printed]
            for file in printed:
                file.close()
        return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]

    return run
