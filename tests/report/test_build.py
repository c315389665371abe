"""A report shows what `calibrate` and `diagnose` have computed."""

import json

import numpy as np
import pytest

from longtail import HALO, MARC, Run
from longtail.cli.main import main
from longtail.metrics.scores import evaluate
from longtail.posthoc import LWS
from longtail.posthoc.base import PostHoc
from longtail.report.build import report_run
from longtail.tasks.calibrate_run import calibrate_run


def test_calibrations_and_diagnosis_are_read_not_fitted(digits_copy, tmp_path, capsys, monkeypatch):
    run = Run.open(digits_copy)
    expected = {}
    for name, method in (("lws", LWS()), ("halo", HALO()), ("marc", MARC()), ("weaker", MARC(gamma=0.5))):
        _, scores = calibrate_run(run, method, "marc" if name == "weaker" else name, out=digits_copy / name)
        expected[name] = next(score for score in scores if score.split == "test").after
    assert main(["diagnose", str(digits_copy)]) == 0
    recommendation = json.loads((digits_copy / "diagnosis-validation.json").read_text())["recommendation"]
    capsys.readouterr()
    monkeypatch.setattr(PostHoc, "fit", None)  # nothing is fitted but the operating points
    monkeypatch.setattr(PostHoc, "fit_checked", None)
    assert main(["report", str(digits_copy), "--out", str(tmp_path / "report")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "fitting MARC at several gammas on" in printed
    assert "not diagnosed yet" not in printed
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    states = {state["title"]: state["scores"]["balanced"] for state in numbers["states"][1:]}
    assert list(states) == ["MARC (weaker)", "MARC (marc)", "HALO", "Decouple-LWS"]  # the newest first
    assert list(states.values()) == [
        round(100 * expected[name].balanced, 1) for name in ("weaker", "marc", "halo", "lws")
    ]
    page = (tmp_path / "report" / "index.html").read_text()
    assert recommendation.split(" (")[0] in page
    assert '<table id="diagnosis">' in page


def test_target_priors_are_those_of_halo(digits_copy, tmp_path):
    run = Run.open(digits_copy)
    train, validation, test = run.outputs("train", views=1), *map(run.outputs, ("validation", "test"))
    halo = HALO(target_prior=0.3)
    calibrate_run(run, halo, images_per_class="all")
    _, summary = report_run([Run.open(digits_copy / "halo")], tmp_path / "report")
    assert summary.after.title == "HALO"
    points = {point.setting: point for point in summary.targets}
    assert [min(points), max(points)] == [-0.5, 1]
    for power in (1.0, 0.3, 0.0, -0.5):
        other = HALO(target_prior=power).fit(train, validation=validation)
        for metrics, outputs in ((points[power].metrics, test), (points[power].validation, validation)):
            logits = np.asarray(other.transform(outputs))
            by_hand = evaluate(logits, outputs.labels, outputs.counts_for_groups)
            assert metrics.nll == pytest.approx(by_hand.nll, rel=1e-3)
            assert metrics.balanced == pytest.approx(by_hand.balanced, abs=0.01)


def test_without_a_calibration_marc_is_fitted_and_that_is_printed(digits_copy, tmp_path, capsys):
    assert main(["report", str(digits_copy), "--out", str(tmp_path / "report")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "about MARC, fitted for this report on" in printed
    assert f"not diagnosed yet: longtail diagnose {digits_copy}" in printed
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [state["title"] for state in numbers["states"]] == ["before", "MARC"]
    assert numbers["targets"] == []
    assert numbers["states"][1]["scores"] == next(one["scores"] for one in numbers["points"] if one["gamma"] == 1.2)
