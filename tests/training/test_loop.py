import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

import longtail
from longtail.config import TrainConfig
from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.files.progress import QUIET, Display
from longtail.files.tensors import read_tensors
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.training.loop import Interrupted, StopRequest, Trainer, TrainingStep

SHORT = replace(RECIPES["digits-lt"], epochs=4, evaluate_every=1, checkpoint_every=1, device="cpu")


def weights(folder):
    return read_tensors(folder / "model.safetensors")[0]


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stop_after(monkeypatch, step: int) -> None:
    """Ask for a stop when that many steps were taken, as Ctrl-C would."""
    seen = {"steps": 0}

    def requested(self, world) -> bool:
        seen["steps"] += 1
        return seen["steps"] == step

    monkeypatch.setattr(StopRequest, "requested", requested)


def wait_for(path, process) -> None:
    """Wait for a file that a process writes, however busy the machine is."""
    while not path.exists():
        assert process.poll() is None, "the process ended before"
        time.sleep(0.02)


def test_training_learns_and_leaves_a_whole_run(tmp_path):
    config = replace(RECIPES["digits-lt"], device="cpu")
    metrics = longtail.train(config, tmp_path / "run")
    assert metrics.top1 > 0.8
    run = Run.open(tmp_path / "run")
    assert run.config == config
    assert run.class_counts.sum() == run.split_sizes["train"]
    assert run.record.versions["torch"] == version("torch")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["validation"]["top1"] == metrics.top1
    assert lines[-1]["loss"] < lines[0]["loss"] / 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
    ]


@pytest.mark.parametrize("step", [1, 7, 12])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, monkeypatch, step):
    config = replace(SHORT, augment=("small-crop", "cutout"))
    longtail.train(config, tmp_path / "whole")
    stop_after(monkeypatch, step)
    with pytest.raises(Interrupted):
        longtail.train(config, tmp_path / "parts")
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    monkeypatch.undo()
    longtail.train(config, tmp_path / "parts", resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))

    def losses(name):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [(entry["step"], entry["loss"], entry["validation"]) for entry in map(json.loads, lines)]

    assert losses("whole") == losses("parts")


def test_the_seed_decides_the_weights(tmp_path):
    short = replace(SHORT, epochs=1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        longtail.train(replace(short, seed=seed), tmp_path / name)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_parts_of_a_batch_add_up(tmp_path):
    """Without batch-norm in the way, accumulating gives the gradient of the whole batch."""
    config = replace(SHORT, epochs=None, iterations=1, lr=1.0, warmup=0, momentum=0.0)
    states = []
    for accumulate in (1, 4):
        world = World(0, 1, torch.device("cpu"))
        config = replace(config, accumulate=accumulate)
        trainer = Trainer(config, tmp_path / f"run{accumulate}", world, Display(quiet=True))
        trainer.state.model.eval()
        for module in trainer.state.model.modules():
            module.train = lambda mode=True: None  # batch-norm keeps its statistics
        trainer.run()
        states.append(trainer.state.model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name, rtol=1e-4, atol=1e-5)


def test_refuses_to_overwrite_or_to_go_on_with_something_else(tmp_path, monkeypatch):
    stop_after(monkeypatch, 2)
    with pytest.raises(Interrupted):
        longtail.train(SHORT, tmp_path / "run")
    monkeypatch.undo()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match="holds a run already; continue with --resume"):
        longtail.train(SHORT, tmp_path / "run")
    with pytest.raises(UserError, match=r"another configuration \(lr: 0.1 → 0.2\)"):
        longtail.train(replace(SHORT, lr=0.2), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="nothing to resume in .*nowhere"):
        longtail.train(SHORT, tmp_path / "nowhere", resume=True)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match="is not finished: continue with `longtail train"):
        Run.open(tmp_path / "run").model()


def test_a_finished_run_is_left_alone(tmp_path):
    config = replace(SHORT, epochs=1)
    longtail.train(config, tmp_path / "run")
    before = weights(tmp_path / "run")
    assert longtail.train(config, tmp_path / "run", resume=True) is None
    assert same(before, weights(tmp_path / "run"))


def test_a_loss_that_explodes_is_said(tmp_path):
    with pytest.raises(UserError, match="no longer finite; use a smaller --lr"):
        longtail.train(replace(SHORT, lr=1e30, epochs=20), tmp_path / "run")


def test_a_batch_divides_into_its_parts(tmp_path):
    with pytest.raises(UserError, match="--batch-size 63 does not divide into 2 parts x 1 processes"):
        longtail.train(replace(SHORT, batch_size=63, accumulate=2), tmp_path / "run")


def test_a_compiled_network_learns_the_same(tmp_path, capsys):
    config = replace(SHORT, epochs=12)
    plain = longtail.train(config, tmp_path / "plain")
    compiled = longtail.train(replace(config, compile=True), tmp_path / "compiled", display=Display())
    assert "does not work here" not in capsys.readouterr().err
    assert compiled.top1 == pytest.approx(plain.top1, abs=0.1)


def test_a_network_that_cannot_be_compiled_is_trained_as_it_is(tmp_path, capsys, monkeypatch):
    def refuse(model):
        raise RuntimeError("no compiler found\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    longtail.train(replace(SHORT, compile=True, epochs=1), tmp_path / "run", display=Display())
    assert (
        "torch.compile does not work here, training continues without it: no compiler found" in capsys.readouterr().err
    )
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_step_is_that_of_sgd_with_momentum_and_weight_decay(tmp_path):
    """The first two steps beside the formula: v = 0.9 v + g + decay w; w = w - lr v."""
    config = replace(SHORT, epochs=None, iterations=2, momentum=0.9, weight_decay=0.05, warmup=0, lr=0.1)
    trainer = Trainer(config, tmp_path / "run", SINGLE_PROCESS, QUIET)
    model = trainer.state.model
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in weights.items()}
    for step, batches in enumerate(trainer._batches()):
        trainer._step(TrainingStep(model, trainer.state.objective), batches)
        rate = trainer.plan.learning_rate(step)
        for name, value in model.named_parameters():
            velocity[name] = 0.9 * velocity[name] + value.grad + 0.05 * weights[name]
            weights[name] = weights[name] - rate * velocity[name]
            torch.testing.assert_close(value.detach(), weights[name], rtol=1e-5, atol=1e-7)


def test_the_callers_random_numbers_stay_as_they_are(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    longtail.train(replace(SHORT, epochs=1), tmp_path / "run")
    assert torch.cat([first, torch.rand(1)]).tolist() == expected.tolist()


def test_tensorboard_files_hold_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    longtail.train(replace(SHORT, epochs=1), tmp_path / "run", trackers=["tensorboard"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert board.Scalars("train/loss")[-1].value == pytest.approx(last["loss"], rel=1e-5)


def test_kill_nine_loses_only_the_steps_since_the_checkpoint(tmp_path):
    """Killed without warning at any moment, a run still resumes, and to the same weights."""
    config = replace(SHORT, epochs=60)
    longtail.train(config, tmp_path / "whole")
    options = ["--epochs", "60", "--evaluate-every", "1", "--checkpoint-every", "1", "--device", "cpu", "--quiet"]
    command = [sys.executable, "-m", "longtail", "train", "digits-lt", "--out", str(tmp_path / "killed"), *options]
    process = subprocess.Popen(command)
    checkpoint = tmp_path / "killed" / "checkpoint.safetensors"
    wait_for(checkpoint, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    longtail.train(config, tmp_path / "killed", resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_lengths_are_one_or_the_other():
    with pytest.raises(UserError, match="either --epochs or --iterations"):
        TrainConfig(backbone="digits")
    with pytest.raises(UserError, match="--batch-size must be a whole number of at least 1, not 0"):
        TrainConfig(backbone="digits", epochs=1, batch_size=0)
