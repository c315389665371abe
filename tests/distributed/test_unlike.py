"""Processes that do not fit together stop, all of them, and one says why."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.errors import UserError
from longtail.recipes import RECIPES
from longtail.training.loop import Interrupted, StopRequest

TRAIN = ["-m", "longtail", "train", "digits-lt", "--epochs", "50", "--device", "cpu", "--quiet"]


def one_reason(ended: list[tuple[int, str]]) -> str:
    """The one line the processes printed, all of them having stopped with exit code 2."""
    assert [code for code, _ in ended] == [2] * len(ended), ended
    printed = "".join(text for _, text in ended)
    lines = [line for line in printed.splitlines() if line.startswith("longtail: ")]
    assert len(lines) == 1, printed
    assert "Traceback" not in printed
    return lines[0]


def test_other_code(by_hand, tmp_path):
    shutil.copytree(Path(longtail.__file__).parent, tmp_path / "src" / "longtail")
    with (tmp_path / "src" / "longtail" / "posthoc" / "solver.py").open("a") as file:
        file.write("# a change on one machine only\n")
    command = [*TRAIN, "--out", tmp_path / "run"]
    ended = by_hand((command, {}, tmp_path), (command, {"PYTHONPATH": str(tmp_path / "src")}, tmp_path))
    assert "process 1 was started differently from process 0 (code: " in one_reason(ended)
    assert not (tmp_path / "run").exists()


def write_pictures(root: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        (root / "train" / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(root / "train" / name / f"{number}.png")


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({}, ["does not exist (process 1)"]),
        ({"cat": 3, "dog": 5}, ["process 1 was started differently from process 0 (", " → 0.2; ", "images: "]),
    ],
)
def test_data_that_one_process_cannot_see_and_another_configuration(by_hand, tmp_path, there, reason):
    write_pictures(tmp_path / "here", {"cat": 5, "dog": 3})
    write_pictures(tmp_path / "there", there)
    command = ["-m", "longtail", "train", "--data", "folder", "--image-size", "8", "--epochs", "1", "--validation", "0"]
    command += ["--workers", "0", "--batch-size", "4", "--device", "cpu", "--out", tmp_path / "run"]
    ended = by_hand(
        ([*command, "--root", tmp_path / "here"], {}, tmp_path),
        ([*command, "--root", tmp_path / "there", "--lr", "0.2"], {}, tmp_path),
    )
    printed = one_reason(ended)
    assert all(part in printed for part in reason)
    assert (str(tmp_path / "there") in printed) == (not there)
    assert not (tmp_path / "run").exists()


def test_a_shard_in_another_folder(by_hand, digits_run, tmp_path):
    """Two machines without a common disk: each has the run, rank 0 finds only its own rows."""
    for name in ("a", "b"):
        shutil.copytree(digits_run, tmp_path / name / "run")
    command = ["-m", "longtail", "extract", "run", "--split", "test", "--device", "cpu"]
    ended = by_hand((command, {}, tmp_path / "a"), (command, {}, tmp_path / "b"))
    assert "rows of a process are missing: run/outputs/.test.shards/1" in one_reason(ended)
    assert not (tmp_path / "a" / "run" / "outputs" / "test.safetensors").exists()


def test_a_broken_row_in_the_share_of_one_process(by_hand, tmp_path):
    labels = np.arange(40) % 2
    logits = np.eye(2, dtype=np.float32)[labels]
    logits[33, 1] = np.nan
    longtail.Outputs(labels, np.array([20, 20]), logits=logits).save(tmp_path / "train.safetensors")
    command = ["-m", "longtail", "calibrate", "train.safetensors", "--out", "calibrated"]
    ended = by_hand((command, {}, tmp_path), (command, {}, tmp_path))
    assert "logits of row 33 contain NaN or inf; drop that sample or correct the model" in one_reason(ended)
    assert not (tmp_path / "calibrated").exists()


def test_resuming_with_another_number_of_processes(by_hand, tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(StopRequest, "requested", lambda self, world: True)
    with pytest.raises(Interrupted):
        longtail.train(replace(RECIPES["digits-lt"], epochs=50, device="cpu"), tmp_path / "run")
    command = [*TRAIN, "--out", tmp_path / "run", "--resume"]
    ended = by_hand((command, {}, tmp_path), (command, {}, tmp_path))
    assert "was written by 1 processes, there are 2 now; resume with the same number" in one_reason(ended)


def test_a_process_that_never_comes(by_hand, tmp_path):
    alone = {"WORLD_SIZE": "2", "LONGTAIL_JOIN_TIMEOUT": "3"}
    ended = by_hand(([*TRAIN, "--out", tmp_path / "run"], alone, tmp_path))
    assert "not all of 2 processes joined within 3 s" in one_reason(ended)


LATE = """
import os, sys, time
from longtail.cli import main
while os.environ["RANK"] == "1":  # until torchrun ends it, because the other process has failed
    time.sleep(0.1)
code = main(["evaluate", "runs/digits"])
print(code, flush=True)
sys.exit(code)
"""


def test_a_process_that_never_comes_under_torchrun(torchrun, tmp_path):
    """There the store is that of the agent, which answers without the missing process."""
    (tmp_path / "late.py").write_text(LATE)
    done = torchrun(tmp_path / "late.py", expect=1, LONGTAIL_JOIN_TIMEOUT="3")
    lines = [line for line in done.stderr.splitlines() if line.startswith("longtail: ")]
    assert lines == ["longtail: not all of 2 processes joined within 3 s: process 1 is missing"]
    assert done.stdout.split() == ["2"]


def test_a_killed_process_is_missed(by_hand, tmp_path):
    """Without torchrun nobody starts it again: the other stops, and says that it was left."""
    script = "import os, signal; from longtail.distributed import join\nwith join('cpu') as world:\n    "
    (tmp_path / "killed.py").write_text(
        script + "world.rank and os.kill(os.getpid(), signal.SIGKILL)\n    world.barrier()\n"
    )
    ended = by_hand((["killed.py"], {}, tmp_path), (["killed.py"], {}, tmp_path))
    assert [code for code, _ in ended] == [1, -9]
    assert "another process ended without reporting a reason" in ended[0][1]


def test_started_without_a_rendezvous(monkeypatch):
    from longtail.distributed import join

    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("", "2"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match=f"but RANK is '{rank}'; start them with torchrun"), join("cpu"):
            pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR expected, but not set; start them with torchrun"), join("cpu"):
        pass


SPEAKING = """
import os, sys, warnings
import longtail.cli.commands.evaluate as command
from longtail.cli import main

def call(*words):
    try:
        main(words)
    except SystemExit:
        pass

call("--help")
call("train", "--help")
call("--version")
call("train", "digits-lt", "--epoch", "3", "--out", "run")
call("compare", "digits-lt")
if os.environ["RANK"] == "1":
    call("trian")
command.main = lambda words: warnings.warn("this is odd") or 0
call("evaluate")
"""


def test_what_goes_wrong_everywhere_is_said_once(torchrun, tmp_path):
    """Also before the processes meet; what goes wrong in one alone is said by that one."""
    (tmp_path / "speaking.py").write_text(SPEAKING)
    done = torchrun(tmp_path / "speaking.py")
    assert done.stdout.count("usage: longtail COMMAND") == 1
    assert done.stdout.count("usage: longtail train") == 1
    assert done.stdout.count(f"longtail {longtail.__version__}\n") == 1
    said = [line.split(";")[0] for line in done.stderr.splitlines() if line.startswith("longtail: ")]
    assert sorted(said) == [
        "longtail: longtail compare runs in one process",
        "longtail: unknown command 'trian' (did you mean 'train'?)",
        "longtail: unrecognized options: --epoch, 3",
        "longtail: warning: this is odd",
    ]
