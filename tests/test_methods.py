"""Every registered method, end to end on long-tailed digits: trains, resumes, evaluates, is listed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longtail
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.files.tensors import read_tensors
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS, build_posthoc
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run
from longtail.training.loop import Interrupted, StopRequest

# Ten classes ask for other settings than the hundreds these defaults were published for.
OPTIONS = {
    "causal-norm": {"alpha": "1"},
    "hybrid-sc": {"variant": "psc", "temperature": "1"},
    "equalization": {"threshold": "0.05"},
}


def config_of(name: str, epochs: float = 30) -> longtail.TrainConfig:
    options = OPTIONS.get(name, {})
    recipe = longtail.RECIPES["digits-lt"]
    return replace(recipe, method=name, options=options, epochs=epochs, device="cpu", evaluate_every=100)


@pytest.mark.parametrize("name", TRAIN_METHODS)
def test_a_stage_one_method_learns_and_is_evaluated(name, tmp_path):
    longtail.train(config_of(name), tmp_path / "run")
    metrics, run, _ = evaluate_run(tmp_path / "run", device="cpu")
    assert metrics.balanced > 0.5  # chance is 0.1
    assert run.config.method == name
    before = metrics.balanced
    folder, scores = calibrate_run(run, longtail.MARC(), "marc")
    repaired, _, _ = evaluate_run(folder, device="cpu")
    assert repaired.confusion == next(s for s in scores if s.split == "test").after.confusion
    assert repaired.balanced > before - 0.1  # methods that are balanced already have little to gain


@pytest.mark.parametrize("name", TRAIN_METHODS)
def test_a_stage_one_method_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    config = config_of(name, epochs=5)
    longtail.train(config, tmp_path / "whole")
    calls = {"steps": 0}

    def requested(self, world):
        calls["steps"] += 1
        return calls["steps"] in (7, 16)

    monkeypatch.setattr(StopRequest, "requested", requested)
    for resume in (False, True):
        with pytest.raises(Interrupted):
            longtail.train(config, tmp_path / "parts", resume=resume)
    monkeypatch.undo()
    longtail.train(config, tmp_path / "parts", resume=True)
    whole, parts = (read_tensors(tmp_path / folder / "model.safetensors")[0] for folder in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.fixture(scope="module")
def calibrated(digits_run, tmp_path_factory) -> dict[str, tuple[Path, longtail.Run]]:
    """Every post-hoc method on one trained network."""
    out = tmp_path_factory.mktemp("calibrated")
    run = Run.open(shutil.copytree(digits_run, out / "digits"))
    results = {}
    for name in POSTHOC_METHODS:
        results[name] = calibrate_run(run, build_posthoc(name, {}), name, out=out / name)
    return results


@pytest.mark.parametrize("name", POSTHOC_METHODS)
def test_a_post_hoc_method_repairs_a_run_that_loads_and_scores_the_same(name, calibrated):
    folder, scores = calibrated[name]
    test = next(score for score in scores if score.split == "test")
    metrics, _, _ = evaluate_run(folder, device="cpu")
    assert metrics.confusion == test.after.confusion
    described = json.loads((folder / "calibration.json").read_text())
    assert described["method"] == name


def test_decision_boundary_methods_raise_few_shot_accuracy_here(calibrated):
    """On one seed; the comparison over three is in docs/results/digits-lt."""
    raised = {}
    for name, method in POSTHOC_METHODS.items():
        if method.family == "decision boundary":
            test = next(score for score in calibrated[name][1] if score.split == "test")
            raised[name] = test.after.few - test.before.few
    assert sum(raised.values()) / len(raised) > 0.1, raised


def test_the_paper_is_complete():
    titles = {method.title for method in (*TRAIN_METHODS.values(), *POSTHOC_METHODS.values())}
    paper = {
        "Softmax", "Class-balanced sampling", "Class-balanced weighting", "Class-Balanced loss", "Focal", "LADE",
        "LDAM-DRW", "Equalization", "Balanced Softmax", "Seesaw", "Decouple-cRT", "Decouple-LWS", "Decouple-tau-norm",
        "DisAlign", "MARC", "BBN", "Hybrid-SC", "OLTR", "Causal Norm (TDE)",
    }  # fmt: skip
    assert len(paper) == 19
    assert paper <= titles
    relatives = {"Logit adjustment", "Temperature scaling", "Vector scaling", "Platt scaling"}
    assert relatives <= titles


def test_the_table_of_methods(capsys):
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {*TRAIN_METHODS, *POSTHOC_METHODS}
    assert all(row["paper"] and row["family"] and row["trains"] for row in rows)


def test_unknown_options_are_named(tmp_path):
    config = replace(config_of("ldam"), options={"max_margn": "0.3"})
    with pytest.raises(UserError, match="unknown option 'max_margn' .did you mean 'max_margin'"):
        longtail.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
