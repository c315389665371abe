import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.metrics.scores import evaluate_logits
from longtail.report.f1 import F1, draw
from longtail.report.style import drawing


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs: two seeds of one data set, one of another."""
    folder = tmp_path_factory.mktemp("f1")
    short = replace(longtail.RECIPES["digits-lt"], epochs=3, device="cpu")
    for name, config in {
        "a": short,
        "b": replace(short, seed=1),
        "c": replace(short, imbalance=10),
    }.items():
        longtail.train(config, folder / name)
    return folder


def test_runs_of_any_data_sets_stand_in_one_figure(runs, tmp_path, capsys):
    sources = [str(runs / name) for name in "abc"]
    assert main(["report", "--f1", *sources, "--out", str(tmp_path), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert {name: len(score["before"]) for name, score in scores.items()} == {
        "digits-LT 30, digits": 2,
        "digits-LT 10, digits": 1,
    }
    stored = json.loads((tmp_path / "f1-over-data-sets.json").read_text())
    assert stored["macro_f1"] == scores
    for kind in ("png", "svg", "pdf"):
        assert (tmp_path / f"f1-over-data-sets.{kind}").stat().st_size > 3000
    assert np.asarray(Image.open(tmp_path / "f1-over-data-sets.png").convert("L")).std() > 5

    train = longtail.Outputs.open(runs / "b" / "outputs" / "train-views1.safetensors")
    test = longtail.Outputs.open(runs / "b" / "outputs" / "test.safetensors")
    logits = test.rows().read(slice(None)).numpy()
    by_hand = [
        evaluate_logits(each, test.labels, test.counts_for_groups).macro_f1
        for each in (logits, longtail.MARC().fit(train).transform(test))
    ]
    own = scores["digits-LT 30, digits"]
    assert [own["before"][1], own["after"][1]] == pytest.approx(by_hand)


def test_a_calibrated_run_is_shown_with_its_own_calibration(runs, tmp_path, capsys):
    assert main(["calibrate", str(runs / "c"), "--method", "lws", "--out", str(tmp_path / "lws"), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["report", "--f1", str(tmp_path / "lws"), "--out", str(tmp_path / "out"), "--json"]) == 0
    (score,) = json.loads(capsys.readouterr().out).values()
    test = longtail.Outputs.open(runs / "c" / "outputs" / "test.safetensors")
    train = longtail.Outputs.open(runs / "c" / "outputs" / "train-views1.safetensors")
    after = evaluate_logits(longtail.LWS().fit(train).transform(test), test.labels, test.counts_for_groups)
    assert score["after"] == pytest.approx([after.macro_f1], abs=1e-6)


def test_bars_are_means_and_dots_are_runs():
    with drawing():
        axes = draw({"one": F1([0.2, 0.4], [0.5, 0.6]), "two": F1([0.1], [0.9])}).axes[0]
    heights = [[bar.get_height() for bar in group] for group in axes.containers]
    np.testing.assert_allclose(heights, [[30, 10], [55, 90]])
    dots = [dots.get_offsets()[:, 1].tolist() for dots in axes.collections]
    np.testing.assert_allclose(dots, [[20, 40], [50, 60]])
    assert [text.get_text() for text in axes.texts] == ["30.0", "10.0", "55.0", "90.0"]


def test_the_figure_needs_a_place(runs, capsys):
    assert main(["report", "--f1", str(runs / "a")]) == 2
    assert "name the folder of the figure with --out FOLDER" in capsys.readouterr().err
