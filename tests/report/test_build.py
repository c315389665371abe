"""A report shows what `calibrate` and `diagnose` have computed."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from longtail import HALO, MARC, Run
from longtail.cli.main import main
from longtail.posthoc import LWS
from longtail.posthoc.base import PostHoc
from longtail.report import build
from longtail.report.build import report_run
from longtail.tasks.calibrate_run import calibrate_run


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """Drawing takes seconds; tests/report/test_figures.py and the command in test_page.py do it."""
    monkeypatch.setattr(build, "write_figures", lambda summary, folder: [])


def test_calibrations_and_diagnosis_are_read_not_fitted(digits_copy, tmp_path, capsys, monkeypatch):
    run = Run.open(digits_copy)
    expected = {}
    for name, method in (("lws", LWS()), ("halo", HALO()), ("marc", MARC()), ("weaker", MARC(gamma=0.5))):
        _, scores = calibrate_run(run, method, "marc" if name == "weaker" else name, out=digits_copy / name)
        expected[name] = next(score for score in scores if score.split == "test").after
    assert main(["diagnose", str(digits_copy)]) == 0
    recommendation = json.loads((digits_copy / "diagnosis-validation.json").read_text())["recommendation"]
    capsys.readouterr()
    monkeypatch.setattr(PostHoc, "fit", None)  # nothing is fitted
    monkeypatch.setattr(PostHoc, "fit_checked", None)
    assert main(["report", str(digits_copy), "--out", str(tmp_path / "report")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "not diagnosed yet" not in printed
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    states = {state["title"]: state["scores"]["balanced"] for state in numbers["states"][1:]}
    assert list(states) == ["MARC (weaker)", "MARC (marc)", "HALO", "Decouple-LWS"]  # the newest first
    assert list(states.values()) == [
        round(100 * expected[name].balanced, 1) for name in ("weaker", "marc", "halo", "lws")
    ]
    page = (tmp_path / "report" / "index.html").read_text()
    assert recommendation.split(" (")[0] in page
    # Every method once: what was fitted, then what diagnose tried besides.
    titles = [row["title"] for row in numbers["methods"]]
    assert titles == ["before", *states, "Logit adjustment", "Decouple-cRT"]
    tried = {one["method"]: one for one in json.loads((digits_copy / "diagnosis-validation.json").read_text())["tried"]}
    rows = {row["title"]: row for row in numbers["methods"]}
    assert rows["HALO"]["gain"].startswith(f"{100 * tried['halo']['gain']['value']:+.1f} [")
    assert rows["Logit adjustment"]["scores"] is None
    assert [row["title"] for row in numbers["methods"] if row["gain"]][:1] == ["MARC (weaker)"]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["--method", "halo", "--strength", "0.6"], "HALO at strength 0.6"),
        (["--method", "marc", "--options", "gamma", "0.5", "--then", "temperature"], "MARC + temperature"),
        (["--method", "marc", "--costs", "costs.csv"], "MARC at strength "),
    ],
)
def test_the_slider_starts_at_the_calibration_and_its_commands_make_its_points(
    digits_copy, tmp_path, words, title, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    costs = np.where(np.eye(10), 0.0, 1.0) * np.array([1.0] * 8 + [20.0] * 2)[:, None]
    lines = [[str(label), *map(str, row)] for label, row in enumerate(costs)]
    Path("costs.csv").write_text("\n".join(",".join(row) for row in [["true", *"0123456789"], *lines]))
    assert main(["calibrate", str(digits_copy), *words, "--out", str(digits_copy / "mine")]) == 0
    _, summary = report_run([Run.open(digits_copy)], tmp_path / "report")
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    assert summary.after.title.startswith(title)
    assert (numbers["points"][0]["cost"] is not None) == ("--costs" in numbers["command"]) == ("--costs" in words)
    points = {point["strength"]: point["scores"] for point in numbers["points"]}
    assert points[numbers["strength"]] == numbers["states"][1]["scores"]
    assert points[0] == numbers["states"][0]["scores"]
    for strength in (0.3, 1):
        more = [] if strength == 1 else ["--strength", str(strength)]
        assert main([*shlex.split(numbers["command"])[1:], *more]) == 0
        scores = json.loads((digits_copy / "mine" / "before-after-test.json").read_text())["after"]
        for name in ("balanced", "natural"):
            assert points[strength][name] == pytest.approx(100 * scores[name], abs=0.06)
        assert points[strength]["nll"] == pytest.approx(scores["nll"], abs=2e-3)


def test_a_calibration_is_shown_once(digits_copy, tmp_path):
    for folder in ("first", "second"):
        assert main(["calibrate", str(digits_copy), "--method", "marc", "--out", str(digits_copy / folder)]) == 0
    _, summary = report_run([Run.open(digits_copy)], tmp_path / "report")
    assert [summary.after.title, *summary.others] == ["MARC"]


def test_without_a_calibration_the_usual_method_is_fitted_and_that_is_printed(digits_copy, tmp_path, capsys):
    assert main(["report", str(digits_copy), "--out", str(tmp_path / "report")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "about HALO, fitted for this report on" in printed
    assert f"not diagnosed yet: longtail diagnose {digits_copy}" in printed
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [state["title"] for state in numbers["states"]] == ["before", "HALO"]
    assert numbers["states"][1]["scores"] == numbers["points"][-1]["scores"]
