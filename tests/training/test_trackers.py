"""Trackers get every number of the journal, also when a run is interrupted and goes on."""

import csv
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import longtail
from longtail.errors import UserError
from longtail.training.loop import Interrupted, StopRequest
from longtail.training.trackers import build_trackers

SHORT = replace(longtail.RECIPES["digits-lt"], epochs=4, evaluate_every=1, checkpoint_every=2, device="cpu")


class Notebook:
    """A tracker of somebody's own."""

    def __init__(self):
        self.calls = []

    def start(self, folder, settings, step):
        self.calls.append(("start", folder.name, settings["lr"], step))

    def log(self, step, values):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


def journal(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_object_is_told_everything(tmp_path):
    notebook = Notebook()
    longtail.train(SHORT, tmp_path / "run", trackers=[notebook])
    assert notebook.calls[0] == ("start", "run", 0.1, 0)
    assert notebook.calls[-1] == ("finish",)
    logged = [call[1:] for call in notebook.calls if call[0] == "log"]
    lines = journal(tmp_path / "run")
    assert [step for step, _ in logged] == [line["step"] for line in lines]
    assert [values["train/loss"] for _, values in logged] == [line["loss"] for line in lines]
    assert [values["validation/nll"] for _, values in logged] == [line["validation"]["nll"] for line in lines]


def test_csv_of_a_resumed_run_is_that_of_an_unbroken_one(tmp_path, monkeypatch):
    longtail.train(SHORT, tmp_path / "whole", trackers=["csv"])
    steps = [line["step"] for line in journal(tmp_path / "whole")]
    asked = iter(range(10_000))
    # Stopped after its third evaluation, and its second checkpoint is taken away: step 3 is done again.
    monkeypatch.setattr(StopRequest, "requested", lambda self, world: next(asked) + 1 == steps[2])
    with pytest.raises(Interrupted):
        longtail.train(SHORT, tmp_path / "run", trackers=["csv"])
    monkeypatch.undo()
    longtail.train(SHORT, tmp_path / "run", resume=True, trackers=["csv"])
    tables = []
    for name in ("whole", "run"):
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
    for one, other in zip(*tables, strict=True):
        assert one.pop("train/images_per_s") != ""
        assert other.pop("train/images_per_s") != ""
        assert one == other
    assert [int(row["step"]) for row in tables[0]] == steps


def test_an_unknown_tracker_is_named(tmp_path):
    with pytest.raises(UserError, match="unknown tracker 'tensorbord' .did you mean 'tensorboard'"):
        longtail.train(SHORT, tmp_path / "run", trackers=["tensorbord"])
    assert not (tmp_path / "run").exists()


def fake_mlflow(calls):
    """MLflow as far as a tracker uses it."""

    def start_run(run_name=None, run_id=None):
        calls.append(("start", run_name, run_id))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    return SimpleNamespace(
        start_run=start_run,
        log_params=lambda given: calls.append(("params", given)),
        log_metrics=lambda values, step: calls.append(("metrics", values, step)),
        end_run=lambda: calls.append(("end",)),
    )


def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow(calls))
    for step in (0, 7):
        (tracker,) = build_trackers(["mlflow"])
        tracker.start(tmp_path, {"lr": 0.1, "root": None}, step)
        tracker.log(step + 1, {"train/loss": 2.0})
        tracker.finish()
    first = [("start", tmp_path.name, None), ("params", {"lr": 0.1})]
    assert calls == [
        *first,
        ("metrics", {"train/loss": 2.0}, 1),
        ("end",),
        ("start", None, "abc"),
        ("metrics", {"train/loss": 2.0}, 8),
        ("end",),
    ]
    assert (tmp_path / "mlflow-run.txt").read_text() == "abc\n"


def test_wandb_without_a_connection(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = replace(SHORT, epochs=1)
    runs, init = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: runs.append(init(**given)) or runs[-1])
    longtail.train(config, tmp_path / "run", trackers=["wandb"])
    (line,) = journal(tmp_path / "run")
    assert runs[0].config["lr"] == 0.1
    assert (tmp_path / "run" / "wandb-run.txt").read_text().strip() == runs[0].id
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{runs[0].id}.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert repr(line["loss"]).encode() in content
    longtail.train(config, tmp_path / "run", overwrite=True)  # its files belong to the run
    assert not (tmp_path / "run" / "wandb").exists()


def test_libraries_that_are_missing_are_named(monkeypatch):
    for name, module, message in (
        ("mlflow", "mlflow", "MLflow is not installed: pip install mlflow-skinny"),
        ("tensorboard", "torch.utils.tensorboard", "TensorBoard is not installed"),
        ("wandb", "wandb", r"Weights & Biases is not installed: pip install 'longtail\[wandb\]'"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=message):
            build_trackers([name])
