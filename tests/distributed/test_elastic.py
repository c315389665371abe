"""A lost worker costs the steps since the last checkpoint and nothing else."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from longtail.files.tensors import read_tensors

from .conftest import free_port, surroundings, torchrun_command

TRAIN = ["-m", "longtail", "train", "digits-lt", "--epochs", "40", "--evaluate-every", "10", "--checkpoint-every", "1"]
TRAIN += ["--device", "cpu", "--quiet"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "model.safetensors")[0]


def same(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every record: with checkpoints between them a loss outlives a restart."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(entry["step"], entry["loss"]) for entry in entries]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    assert path.exists()


def workers_of(agent: int) -> list[int]:
    children = Path(f"/proc/{agent}/task/{agent}/children")
    if not children.exists():
        pytest.skip("the kernel does not list the children of a process")
    return [int(child) for child in children.read_text().split()]


@pytest.fixture(scope="module")
def undisturbed(torchrun, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elastic") / "whole"
    torchrun("--rdzv-id=digits", *TRAIN, "--out", folder)
    return folder


def test_a_killed_worker_is_started_again_and_nothing_is_lost(undisturbed, tmp_path):
    """Only the agent that lost its worker counts a restart; the processes of both meet anew all the same."""
    folder = tmp_path / "run"
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    start += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=agents"]
    command = [*start, *TRAIN, "--out", str(folder)]
    agents = [subprocess.Popen(command, env=surroundings(), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_for(folder / "checkpoint.safetensors", agents[0])
        os.kill(workers_of(agents[0].pid)[0], signal.SIGKILL)
        printed = [agent.communicate(timeout=600)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # which ends its workers too
            agent.wait(30)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)
    assert "exitcode: -9" in printed[0]
    assert same(folder, undisturbed)
    assert losses(folder) == losses(undisturbed)


def test_a_restart_does_not_take_over_the_run_of_another_launch(undisturbed, monkeypatch):
    """A folder that was there before is refused after a restart as it is at the start."""
    from dataclasses import replace

    import longtail
    from longtail.errors import UserError
    from longtail.runs.folder import Run

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(UserError, match="holds a run already"):
        longtail.train(replace(Run.open(undisturbed).config), undisturbed)


def test_a_launch_of_the_same_name_does_not_take_over_a_run(undisturbed, torchrun):
    before = {path: path.read_bytes() for path in undisturbed.iterdir()}
    done = torchrun("--rdzv-id=digits", "--max-restarts=1", *TRAIN, "--out", undisturbed, expect=1)
    assert done.stderr.count("holds a run already; continue with --resume") == 2
    assert {path: path.read_bytes() for path in undisturbed.iterdir()} == before


@pytest.fixture
def hosts():
    """Two network namespaces joined by a cable: (name, address) of each."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    mark = uuid.uuid4().hex[:6]
    names = [f"lt{mark}{side}" for side in "ab"]
    addresses = ["10.231.7.1", "10.231.7.2"]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add {names[0]} type veth peer name {names[1]}")
    for name, address in zip(names, addresses, strict=True):
        commands.append(f"link set {name} netns {name}")
        commands.append(f"-n {name} addr add {address}/24 dev {name}")
        commands += [f"-n {name} link set {device} up" for device in (name, "lo")]
    try:
        for command in commands:
            done = subprocess.run([ip, *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces are not allowed here: ip {command}: {done.stderr.strip()}")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], capture_output=True)


def test_two_hosts(hosts, undisturbed, tmp_path):
    """One process on each of two hosts trains as two processes on one host do."""
    started = []
    for name, address in hosts:
        start = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        start += ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0][1]}:29400"]
        hosting = int(address == hosts[0][1])
        start += ["--rdzv-id=longtail", f"--local-addr={address}", f"--rdzv-conf=is_host={hosting},join_timeout=600"]
        environment = surroundings(GLOO_SOCKET_IFNAME=name)
        command = [*start, *TRAIN, "--out", str(tmp_path / "run")]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        ended = [process.communicate(timeout=600)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(ended)
    assert same(tmp_path / "run", undisturbed)


def test_workers_end_with_a_killed_agent_and_the_relaunch_goes_on(undisturbed, tmp_path):
    """Nobody writes beside the relaunch: the processes of a killed torchrun end by themselves."""
    folder = tmp_path / "run"
    process = subprocess.Popen(torchrun_command(*TRAIN, "--out", folder), env=surroundings(), stderr=subprocess.DEVNULL)
    wait_for(folder / "checkpoint.safetensors", process)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 600
    while any(Path(f"/proc/{worker}/fd").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not (folder / "model.safetensors").exists():
        again = torchrun_command(*TRAIN, "--out", folder, "--resume")
        assert subprocess.run(again, env=surroundings(), timeout=600, check=False).returncode == 0
    assert same(folder, undisturbed)
    assert losses(folder) == losses(undisturbed)
