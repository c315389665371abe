"""Runs that die, are signalled or started twice, or find their own files damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.files import atomic
from longtail.files.atomic import locked_folder
from longtail.files.tensors import read_tensors, write_tensors
from longtail.recipes import RECIPES
from longtail.training.journal import Journal
from longtail.training.loop import StopRequest

EPOCHS = replace(RECIPES["digits-lt"], epochs=2, evaluate_every=1, checkpoint_every=1, device="cpu")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, stop_after):
    """A run that was stopped after its seventh step."""
    folder = tmp_path_factory.mktemp("faults") / "run"
    stop_after(EPOCHS, folder, 7)
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_run_that_dies_before_its_first_checkpoint_records_nothing_twice(tmp_path, monkeypatch):
    longtail.train(EPOCHS, tmp_path / "whole")
    monkeypatch.setattr(Journal, "save", lambda self, state: sys.exit("killed"))
    with pytest.raises(SystemExit):
        longtail.train(EPOCHS, tmp_path / "run")
    monkeypatch.undo()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    longtail.train(EPOCHS, tmp_path / "run", resume=True)
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "whole")]
    assert [json.loads(line)["step"] for line in lines[0]] == [json.loads(line)["step"] for line in lines[1]]


def test_a_second_process_is_refused_while_a_run_is_held(run, monkeypatch):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    monkeypatch.setattr(atomic, "LOCK_SECONDS", 0)
    with locked_folder(run):
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
            longtail.train(EPOCHS, run, resume=True)
        assert {path.name: path.read_bytes() for path in run.iterdir() if path.name != ".lock"} == before
    longtail.train(EPOCHS, run, resume=True)


def without(prefix):
    return lambda tensors, header: tensors.pop(
        next(key for key in tensors if key.startswith(prefix) and key.endswith("weight"))
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


@pytest.mark.parametrize("message", [*DAMAGES, "is damaged: .* is not what was written"])
def test_a_checkpoint_that_cannot_be_of_the_run_is_refused(run, message):
    path = run / "checkpoint.safetensors"
    if message in DAMAGES:
        tensors, header = read_tensors(path)
        DAMAGES[message](tensors, header)
        write_tensors(path, tensors, header)
    else:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        longtail.train(EPOCHS, run, resume=True)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


# A closed terminal is ignored below nohup, whose children inherit that: the tests may run there.
NOT_UNDER_NOHUP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from longtail.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_saves_the_run(tmp_path, number):
    """Schedulers and closed terminals signal loader workers too; the run is saved all the same."""
    rng = np.random.default_rng(0)
    for label, image in np.ndindex(2, 8):
        (tmp_path / "photos" / str(label)).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / str(label) / f"{image}.png")
    words = ["train", "--data", "folder", "--root", str(tmp_path / "photos"), "--backbone", "resnet8", "--image-size"]
    words += ["16", "--epochs", "100000", "--batch-size", "4", "--workers", "2", "--validation", "0", "--device", "cpu"]
    command = [sys.executable, "-c", NOT_UNDER_NOHUP, *words, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert process.poll() is None, "the process ended before"
            time.sleep(0.02)
        os.killpg(process.pid, number)
        _, printed = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 143, printed
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
from longtail.cli.main import main
sys.exit(main(["train", "digits-lt", "--out", {str(tmp_path / "run")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (143, "longtail: terminated\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_comparison_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch, capfd, number):
    words = ["compare", "digits-lt", "--epochs=1", "--methods=softmax", "--seeds=0", "--device=cpu", "--quiet"]
    words += ["--out", str(tmp_path / "out")]
    asked = iter(range(1, 1000))
    monkeypatch.setattr(StopRequest, "requested", lambda self, world: number if next(asked) == 3 else 0)
    assert main(words) == 128 + number
    assert capfd.readouterr().err == "longtail: stopped after step 3; run the same command again to continue\n"
    assert main(words) == 0
    assert (tmp_path / "out" / "results.csv").is_file()
