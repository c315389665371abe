"""Trackers get every number of the journal, also when a run is interrupted and goes on."""

import csv
import json
import sys
from dataclasses import replace

import pytest

import longtail
from longtail.errors import UserError
from longtail.training import trackers
from longtail.training.trackers import build_trackers

SHORT = replace(longtail.RECIPES["digits-lt"], epochs=4, evaluate_every=1, checkpoint_every=2, device="cpu")
ONCE = replace(SHORT, epochs=1)


class Notebook:
    """A tracker of somebody's own."""

    def __init__(self):
        self.calls = []

    def start(self, folder, settings, step):
        self.calls.append((folder.name, settings["lr"], step))

    def log(self, step, values):
        self.calls.append((step, values))

    def finish(self):
        self.calls.append("finished")


class Broken(Notebook):
    """A library whose server cannot be reached, from the first call or after the start."""

    at_start = True

    def start(self, folder, settings, step):
        if self.at_start:
            raise ConnectionError("no server\nat this address")

    def log(self, step, values):
        raise ConnectionError("the server\nis gone")


def journal(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_object_and_tensorboard_get_every_number(tmp_path):
    notebook = Notebook()
    longtail.train(SHORT, tmp_path / "run", trackers=[notebook, "tensorboard"])
    start, *logged, end = notebook.calls
    assert (start, end) == (("run", 0.1, 0), "finished")
    lines = journal(tmp_path / "run")
    for (step, values), line in zip(logged, lines, strict=True):
        assert (step, values["train/loss"], values["validation/nll"]) == (
            line["step"], line["loss"], line["validation"]["nll"],
        )  # fmt: skip
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert board.Scalars("train/loss")[-1].value == pytest.approx(lines[-1]["loss"], rel=1e-5)


def test_csv_of_a_resumed_run_is_that_of_an_unbroken_one(tmp_path, stop_after):
    longtail.train(SHORT, tmp_path / "whole", trackers=["csv"])
    steps = [line["step"] for line in journal(tmp_path / "whole")]
    # Stopped after its third evaluation, and its second checkpoint is taken away: step 3 is done again.
    stop_after(SHORT, tmp_path / "run", steps[2], trackers=["csv"])
    longtail.train(SHORT, tmp_path / "run", resume=True, trackers=["csv"])
    tables = []
    for name in ("whole", "run"):
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
        assert all(row.pop("train/images_per_s") for row in tables[-1])
    assert tables[0] == tables[1]
    assert [int(row["step"]) for row in tables[0]] == steps


def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "server").as_uri())
    mlflow.set_experiment("digits")  # another test of this process may have set one of another server
    for step in (0, 7):
        (tracker,) = build_trackers(["mlflow"])
        tracker.start(tmp_path, {"lr": 0.1, "root": None}, step)
        tracker.log(step + 1, {"train/loss": 2.0})
        tracker.finish()
    run_id = (tmp_path / "mlflow-run.txt").read_text().strip()
    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    assert (run.info.run_name, run.data.params) == (tmp_path.name, {"lr": "0.1"})
    assert [metric.step for metric in client.get_metric_history(run_id, "train/loss")] == [1, 8]


def test_wandb_without_a_connection(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    longtail.train(ONCE, tmp_path / "run", trackers=["wandb"])
    run_id = (tmp_path / "run" / "wandb-run.txt").read_text().strip()
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.{wandb.__name__}")
    assert repr(journal(tmp_path / "run")[0]["loss"]).encode() in file.read_bytes()
    longtail.train(ONCE, tmp_path / "run", overwrite=True)  # its files belong to the run
    assert not (tmp_path / "run" / "wandb").exists()


def test_a_library_that_fails_costs_no_training(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Broken)
    with pytest.raises(UserError, match="^--tracker mlflow cannot start: no server"):
        longtail.train(ONCE, tmp_path / "run", trackers=["mlflow"])
    assert not (tmp_path / "run" / "run.json").exists()
    monkeypatch.setattr(Broken, "at_start", False)
    with pytest.warns(UserWarning, match="--tracker mlflow gets no more numbers .the server.*; training") as told:
        longtail.train(SHORT, tmp_path / "run", trackers=["mlflow"])
    assert len(told) == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_libraries_that_are_missing_are_named(monkeypatch):
    for name, module, message in (
        ("mlflow", "mlflow", "MLflow is not installed: pip install mlflow-skinny"),
        ("tensorboard", "torch.utils.tensorboard", "TensorBoard is not installed"),
        ("wandb", "wandb", r"Weights & Biases is not installed: pip install 'longtail\[wandb\]'"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=message):
            build_trackers([name])
