"""Starting several processes: through torchrun, or each by hand with its own surroundings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def torchrun():
    """`torchrun(words…)` runs two processes and returns what they printed; an error if that is not `expect`."""

    def run(*words: object, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            torchrun_command(*words), capture_output=True, text=True, env=surroundings(**environment), timeout=180
        )
        assert done.returncode == expect, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def by_hand():
    """`by_hand(first, second)` starts the processes of one run, each given as (words, environment, folder)."""

    def run(*ranks: tuple[list[object], dict[str, str], Path], seconds: float = 60) -> list[tuple[int, str]]:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(ranks))}
        started = [
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=surroundings(**{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, (words, environment, folder) in enumerate(ranks)
        ]
        try:
            printed = [process.communicate(timeout=seconds)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]

    return run
