"""Runs that die, are started twice, or find their own files damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.errors import Interrupted, UserError
from longtail.files import atomic
from longtail.files.atomic import holding
from longtail.files.tensors import read_tensors, write_tensors
from longtail.recipes import RECIPES
from longtail.training.journal import Journal
from longtail.training.loop import StopRequest

SHORT = replace(RECIPES["digits-lt"], epochs=2, evaluate_every=1, checkpoint_every=1, device="cpu")


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after its seventh step."""
    folder = tmp_path_factory.mktemp("faults") / "run"
    asked = iter(range(1, 1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRequest, "requested", lambda self, world: next(asked) == 7)
        with pytest.raises(Interrupted):
            longtail.train(SHORT, folder)
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    import shutil

    return shutil.copytree(stopped, tmp_path / "run")


def test_a_run_that_dies_before_its_first_checkpoint_records_nothing_twice(tmp_path, monkeypatch):
    longtail.train(SHORT, tmp_path / "whole")

    def die(self, state) -> None:
        raise Killed

    monkeypatch.setattr(Journal, "save", die)
    with pytest.raises(Killed):
        longtail.train(SHORT, tmp_path / "run")
    monkeypatch.undo()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    longtail.train(SHORT, tmp_path / "run", resume=True)
    whole, again = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "run"))
    assert [json.loads(line)["step"] for line in again] == [json.loads(line)["step"] for line in whole]


def test_a_second_process_is_refused_while_a_run_is_held(run, monkeypatch):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    monkeypatch.setattr(atomic, "LOCK_SECONDS", 0)
    with holding(run):
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
            longtail.train(SHORT, run, resume=True)
        assert {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"} == before
    longtail.train(SHORT, run, resume=True)


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        longtail.train(SHORT, tmp_path / "run", resume=True)
    assert list(tmp_path.iterdir()) == []


def without(name):
    return lambda tensors, header: tensors.pop(
        next(key for key in tensors if key.startswith(name) and key.endswith("weight"))
    )


DAMAGES = {
    "its state of the optimiser is not whole": without("momentum."),
    "does not fit the network of its run": without("model."),
    "step 1000000000 of": lambda tensors, header: header.update(step=10**9),
    "step -1 of": lambda tensors, header: header.update(step=-1),
    "it has no step": lambda tensors, header: header.pop("step"),
    "processes is null, not of type int": lambda tensors, header: header.update(processes=None),
    "its sums of the loss": lambda tensors, header: header.update(loss_sums=[]),
    "the state of the optimiser for": lambda tensors, header: tensors.update(
        {name: value[:1] for name, value in tensors.items() if name.startswith("momentum.")}
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_checkpoint_that_cannot_be_of_the_run_is_refused(run, said):
    path = run / "checkpoint.safetensors"
    tensors, header = read_tensors(path)
    DAMAGES[said](tensors, header)
    write_tensors(path, tensors, header)
    with pytest.raises(UserError, match=said) as error:
        longtail.train(SHORT, run, resume=True)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_flipped_bit_in_a_checkpoint_is_noticed(run):
    path = run / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint.safetensors is damaged: .* is not what was written"):
        longtail.train(SHORT, run, resume=True)


def test_what_is_left_beside_a_finished_model_is_removed(run):
    checkpoint = (run / "checkpoint.safetensors").read_bytes()
    longtail.train(SHORT, run, resume=True)
    (run / "checkpoint.safetensors").write_bytes(checkpoint)
    (run / ".model.safetensors.abc.part").write_bytes(b"half")
    longtail.train(SHORT, run, resume=True)
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "model.safetensors", "run.json"]


def wait_for(path, process) -> None:
    deadline = time.monotonic() + 600
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


# A closed terminal is ignored below nohup, whose children inherit that: the tests may run there.
NOT_UNDER_NOHUP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from longtail.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_to_the_whole_group_saves_the_run(tmp_path, number, code):
    """Schedulers and closed terminals signal loader workers too; the run is saved all the same, and goes on."""
    rng = np.random.default_rng(0)
    for label in range(2):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        for image in range(8):
            pixels = rng.integers(0, 255, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / str(label) / f"{image}.png")
    words = ["train", "--data", "folder", "--root", str(tmp_path / "photos"), "--backbone", "resnet8", "--image-size"]
    words += ["16", "--epochs", "100000", "--batch-size", "4", "--workers", "2", "--validation", "0", "--device", "cpu"]
    words += ["--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", NOT_UNDER_NOHUP, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl", process)
        os.killpg(process.pid, number)
        _, printed = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code, printed
    assert "continue with: longtail train" in printed
    assert "Traceback" not in printed
    assert read_tensors(tmp_path / "run" / "checkpoint.safetensors")[1]["step"] > 0


def test_sigterm_before_the_loop_is_one_line(tmp_path):
    """The program asks for its own end as soon as the data are read."""
    program = f"""
import os, signal, sys
import longtail.training.loop as loop
before = loop.open_splits
def read(config):
    os.kill(os.getpid(), signal.SIGTERM)
    return before(config)
loop.open_splits = read
from longtail.cli import main
sys.exit(main(["train", "digits-lt", "--out", {str(tmp_path / "run")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (143, "longtail: terminated\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_comparison_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch, capfd, number):
    from longtail.cli import main

    words = ["compare", "digits-lt", "--epochs=1", "--methods=softmax", "--seeds=0", "--device=cpu", "--quiet"]
    words += ["--out", str(tmp_path / "out")]
    asked = iter(range(1, 1000))
    monkeypatch.setattr(StopRequest, "requested", lambda self, world: number if next(asked) == 3 else 0)
    assert main(words) == 128 + number
    assert capfd.readouterr().err == "longtail: stopped after step 3; run the same command again to continue\n"
    assert main(words) == 0
    assert (tmp_path / "out" / "results.csv").is_file()
