"""A command in two processes under torchrun's own agent, without two seconds of imports for each of them.

The agent is the one that `torchrun` starts: it serves the store, watches its workers and ends the rest when one dies.
What it starts is a small program, this file, that hands its environment to a fork of the warm process and does as that
does: the fork is the agent's child as well, ends when this program is killed, and its end is the program's end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

PROCESSES = 2
Words = tuple[str, ...]


def start_torchrun(words: Words, folder: Path, before: Callable[[], None] = lambda: None, rank: int = 0) -> int:
    """Start a command under an agent and return the agent's process; `before` is called in the worker of this rank."""
    from fault_tools import in_fork

    def command() -> int:
        from fault_tools import at

        from longtail.cli import main
        from longtail.launch import exit_with_parent

        exit_with_parent.cache_clear()  # the warm process is not a worker, this one is
        if os.environ["RANK"] == str(rank):
            before()
        return main(at(folder, words))

    def agent() -> int:
        # Names of this launch alone: a program of an agent that was killed must not find the next one's worker.
        meeting = folder.parent / uuid.uuid4().hex[:8]
        workers = [_fork_worker(f"{meeting}-{number}", command) for number in range(PROCESSES)]  # before any thread
        try:
            return _launch(meeting)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)

    return in_fork(agent, folder, "said.txt")


def under_torchrun(words: Words, folder: Path, before: Callable[[], None] = lambda: None, rank: int = 0) -> int:
    """Run a command under an agent to its end: 0, or the exit code of the worker that failed, minus its signal."""
    from fault_tools import wait

    code = wait(start_torchrun(words, folder, before, rank))
    return code - 256 if code > 200 else code  # an exit code has no sign


def _launch(meeting: Path) -> int:
    import logging
    import shutil

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=PROCESSES,
        logs_specs=DefaultLogsSpecs(log_dir=f"{meeting}-agent"),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-S", "-E", __file__, str(meeting))
    except ChildFailedError as error:
        return min(failure.exitcode for failure in error.failures.values())
    finally:
        shutil.rmtree(f"{meeting}-agent", ignore_errors=True)
    return 0


def _fork_worker(place: str, command: Callable[[], int]) -> int:
    """Fork a process that waits for the program at a place, takes its environment and runs a command."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    worker = os.fork()
    if worker:
        server.close()
        return worker
    code = 70
    try:
        program, _ = server.accept()
        with program.makefile("r") as lines:
            os.environ.update(json.loads(lines.readline()))
        program.sendall(f"{os.getpid()}\n".encode())
        threading.Thread(target=_end_with, args=(program,), daemon=True).start()
        code = command()
        program.sendall(str(code).encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(program: socket.socket) -> None:
    if not program.recv(1):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """What the agent starts."""
    program = socket.socket(socket.AF_UNIX)
    program.connect(f"{sys.argv[1]}-{os.environ['LOCAL_RANK']}")
    program.sendall((json.dumps(dict(os.environ)) + "\n").encode())
    worker = int(program.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(worker, number))
    if code := program.recv(64):
        os._exit(int(code))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
