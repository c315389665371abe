"""Trackers get every number of the journal, also when a run is interrupted and goes on."""

import csv
import json
from dataclasses import replace

import pytest

import longtail
from longtail.errors import UserError
from longtail.training.loop import Interrupted
from longtail.training.stop import StopRequest

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
