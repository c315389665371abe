"""Whole runs: what they leave, what they refuse, and how they go on after an interruption."""

import json
from dataclasses import asdict, replace
from importlib.metadata import version

import pytest
import torch

import longtail
from longtail.cli.main import main
from longtail.config import from_dict
from longtail.errors import UserError
from longtail.files.progress import Display
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.tasks.evaluate import evaluate_run

EPOCHS = replace(RECIPES["digits-lt"], epochs=2, evaluate_every=1, checkpoint_every=1, device="cpu")
LEFT = ["metrics.jsonl", "model.safetensors", "run.json"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def journal(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_learns_and_leaves_a_whole_run(tmp_path):
    config = replace(RECIPES["digits-lt"], device="cpu")
    metrics = longtail.train(config, tmp_path / "run")
    assert metrics.top1 > 0.8
    run, lines = Run.open(tmp_path / "run"), journal(tmp_path / "run")
    assert run.config == config
    assert run.class_counts.sum() == run.split_sizes["train"]
    assert run.record.versions["torch"] == version("torch")
    assert lines[-1]["validation"]["top1"] == metrics.top1
    assert lines[-1]["loss"] < lines[0]["loss"] / 3
    assert names(tmp_path / "run") == LEFT


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        ((1,), {"augment": ("small-crop", "cutout")}),
        ((3, 8), {"mix": "mixup"}),
        ((3, 8), {"mix": "cutmix", "accumulate": 2, "method": "balanced-softmax"}),
        ((3, 8), {"mix": "remix", "label_smoothing": 0.1, "defer": 0.5}),
        ((3, 8), {"method": "seesaw", "defer": 0.5}),
        ((3, 8), {"optimizer": "adamw", "lr": 0.01, "ema": 0.9, "clip_norm": 1.0}),
        ((3, 8), {"ema": 0.9}),
    ],
)
def test_an_interrupted_run_goes_on_bit_for_bit(short, stop_after, same_weights, tmp_path, steps, settings):
    config = replace(short, iterations=12, **settings)
    longtail.train(config, tmp_path / "whole")
    stop_after(config, tmp_path / "parts", *steps)
    longtail.train(config, tmp_path / "parts", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (
        [(line["step"], line["loss"], line["validation"]) for line in journal(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert whole == parts


def test_the_seed_alone_decides_the_weights(short, same_weights, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    drawn = [torch.rand(1)]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        longtail.train(replace(short, seed=seed), tmp_path / name)
    assert torch.equal(torch.cat([*drawn, torch.rand(1)]), expected)  # the caller's random numbers stay as they are
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_the_averaged_weights_are_scored_and_saved(same_weights, tmp_path):
    metrics = longtail.train(replace(EPOCHS, ema=0.98), tmp_path / "average")
    longtail.train(EPOCHS, tmp_path / "plain")
    assert not same_weights(tmp_path / "average", tmp_path / "plain")
    assert evaluate_run(tmp_path / "average", "validation", device="cpu")[0].confusion == metrics.confusion


def test_what_cannot_be_trained_is_refused_and_nothing_changes(short, stop_after, tmp_path):
    stop_after(replace(short, ema=0.5), tmp_path / "run", 2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for settings, resume, message in (
        ({"ema": 0.5}, False, "holds a run already; continue with --resume"),
        ({"ema": 0.5, "lr": 0.2}, True, r"another configuration \(lr: 0.1 → 0.2\)"),
        ({}, True, r"another configuration \(ema: 0.5 → None\)"),
    ):
        with pytest.raises(UserError, match=message):
            longtail.train(replace(short, **settings), tmp_path / "run", resume=resume)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match="is not finished: continue with `longtail train"):
        Run.open(tmp_path / "run").model()
    with pytest.raises(UserError, match="nothing to resume in .*nowhere"):
        longtail.train(short, tmp_path / "nowhere", resume=True)
    with pytest.raises(UserError, match="no longer finite; use a smaller --lr"):
        longtail.train(replace(short, lr=1e30, iterations=100), tmp_path / "nowhere")
    with pytest.raises(UserError, match="unknown tracker 'tensorbord' .did you mean 'tensorboard'"):
        longtail.train(short, tmp_path / "elsewhere", trackers=["tensorbord"])
    assert names(tmp_path) == ["run"]


def test_settings_from_before_an_option_are_those_without_it(short):
    new = ("mix", "mix_alpha", "label_smoothing", "defer", "optimizer", "clip_norm", "ema")
    assert from_dict({name: value for name, value in asdict(short).items() if name not in new}) == short


def test_a_finished_run_is_left_alone_and_cleaned(short, stop_after, tmp_path):
    stop_after(short, tmp_path / "run", 2)
    checkpoint = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    longtail.train(short, tmp_path / "run", resume=True)
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(checkpoint)
    (tmp_path / "run" / ".model.safetensors.part").write_bytes(b"half")
    assert longtail.train(short, tmp_path / "run", resume=True) is None
    assert names(tmp_path / "run") == LEFT
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights


def test_a_compiled_network_learns_the_same(tmp_path, capsys, monkeypatch):
    config = replace(EPOCHS, epochs=12)
    plain = longtail.train(config, tmp_path / "plain")
    compiled = longtail.train(replace(config, compile=True), tmp_path / "compiled", display=Display())
    assert "does not work here" not in capsys.readouterr().err
    assert compiled.top1 == pytest.approx(plain.top1, abs=0.1)

    def refuse(model):
        raise RuntimeError("no compiler found\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    longtail.train(replace(EPOCHS, compile=True), tmp_path / "as-is", display=Display())
    told = "torch.compile does not work here, training continues without it: no compiler found"
    assert told in capsys.readouterr().err
    assert names(tmp_path / "as-is") == LEFT


def test_slow_and_unusual_settings_are_mentioned(short, tmp_path, monkeypatch, capsys):
    with pytest.warns(UserWarning, match="--lr 0.1 is large for AdamW; about 0.001 is usual"):
        longtail.train(replace(short, optimizer="adamw", iterations=1), tmp_path / "adamw")
    line = "--precision bf16 is slow here: this processor has no bfloat16 instructions"
    words = ["--precision=bf16", "--iterations=2", "--batch-size=8", "--device=cpu"]
    compare = ["compare", "digits-lt", "--methods", "softmax", "cbs", "--seeds", "0"]
    for emulated in (True, False):
        monkeypatch.setattr("longtail.training.setup.emulates_bfloat16", lambda device, said=emulated: said)
        for number, command in enumerate((["train", "digits-lt"], compare)):
            assert main([*command, f"--out={tmp_path / f'{number}-{emulated}'}", *words]) == 0
            told = " ".join(capsys.readouterr().err.split())
            assert told.count(line) == emulated
            if emulated and number == 0:
                assert told.index(line) < told.index("steps of 8 images")
