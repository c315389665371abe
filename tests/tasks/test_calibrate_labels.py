"""Saved logits with several labels per sample from the command line, beside scikit-learn for each label."""

import json
import warnings

import numpy as np
import pytest
from scipy.special import expit, logit
from sklearn import metrics
from sklearn.linear_model import LogisticRegression

from longtail.cli.main import main
from longtail.files.tensors import read_tensors

NAMES = ["cough", "fever", "rash", "gout"]
SHARES = np.array([0.5, 0.2, 0.1, 0.05])
UNITS = np.array([2.0, 0.7, 1.5, 1.0])


@pytest.fixture
def files(tmp_path):
    """`files(split, **changes)`: a file of logits in a wrong unit, labels drawn from the right ones, and a head."""
    rng = np.random.default_rng(0)

    def write(split, **changes):
        inputs = rng.normal(size=(600, 3)).astype(np.float32)
        weight = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
        right = inputs @ weight.T + logit(SHARES)
        arrays = {"logits": (UNITS * right).astype(np.float32), "labels": rng.random(right.shape) < expit(right)}
        head = {"head_weight": UNITS[:, None] * weight, "head_bias": UNITS * logit(SHARES), "features": inputs}
        np.savez(tmp_path / f"{split}.npz", **{**arrays, **head, "class_names": NAMES, **changes})
        return str(tmp_path / f"{split}.npz"), {**arrays, **head}

    return write


def calibrate(*words):
    return main(["calibrate", *map(str, words), "--method", "multilabel"])


def test_every_label_is_calibrated_and_scored_as_scikit_learn_does(files, tmp_path, capsys):
    (held_out, fitted_on), (test, new) = files("held-out"), files("test")
    words = (held_out, "--test", test, "--out", tmp_path / "out", "--options", "ridge", "1e-9", "--json")
    assert calibrate(*words) == 0
    scores = json.loads(capsys.readouterr().out)["test"]
    stored = json.loads((tmp_path / "out" / "before-after-test.json").read_text())
    assert (stored["before"], stored["after"]) == (scores["before"], scores["after"])
    calibrated = np.empty(new["logits"].shape)
    for label in range(4):
        alone = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000)
        alone.fit(fitted_on["logits"][:, [label]], fitted_on["labels"][:, label])
        calibrated[:, label] = alone.decision_function(new["logits"][:, [label]])
    written = read_tensors(tmp_path / "out" / "test-calibrated.safetensors")[0]
    np.testing.assert_allclose(written["logits"], calibrated, rtol=1e-3, atol=1e-3)
    for logits, found in ((new["logits"], scores["before"]), (calibrated, scores["after"])):
        pairs = [(values, truth) for values, truth in zip(logits.T, new["labels"].T, strict=True)]
        expected = {
            "average_precision": [metrics.average_precision_score(truth, values) for values, truth in pairs],
            "balanced": [metrics.balanced_accuracy_score(truth, values > 0) for values, truth in pairs],
            "macro_f1": [metrics.f1_score(truth, values > 0) for values, truth in pairs],
            "nll": [metrics.log_loss(truth, expit(values)) for values, truth in pairs],
            "brier": [metrics.brier_score_loss(truth, expit(values)) for values, truth in pairs],
        }
        assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, abs=1e-3)
    head = read_tensors(tmp_path / "out" / "head.safetensors")[0]
    np.testing.assert_allclose(new["features"] @ head["weight"].numpy().T + head["bias"].numpy(), calibrated, atol=1e-2)


def test_the_target_is_a_word_a_number_or_a_file(files, tmp_path):
    held_out, fitted_on = files("held-out")
    table = tmp_path / "shares.csv"
    table.write_text("label,share\n" + "".join(f"{name},0.{place}\n" for place, name in enumerate(NAMES, 1)))
    shifts = {}
    for target in ("train", "balanced", 0.3, table):
        out = tmp_path / f"out-{len(shifts)}"
        assert calibrate(held_out, "--out", out, "--target-prior", target, "--quiet") == 0
        shifts[target] = np.array(json.loads((out / "calibration.json").read_text())["shift_"])
    present = logit(fitted_on["labels"].mean(0))
    for target, shares in (("balanced", 0.5), (0.3, 0.3), (table, np.array([0.1, 0.2, 0.3, 0.4]))):
        np.testing.assert_allclose(shifts[target] - shifts["train"], logit(shares) - present)


def test_it_is_fitted_on_the_held_out_file_and_the_export_names_sigmoids(files, tmp_path, capsys):
    (train, _), (held_out, fitted_on) = files("train"), files("held-out")
    assert calibrate(train, "--validation", held_out, "--out", tmp_path / "out") == 0
    assert f"fitted on 600 samples of {held_out}" in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "out" / "calibration.json").read_text())["prevalence_"] == pytest.approx(
        fitted_on["labels"].mean(0)
    )
    assert main(["export", str(tmp_path / "out"), "--format", "npz", "--out", str(tmp_path / "out.npz")]) == 0
    assert "probabilities = 1 / (1 + exp(-logits)); predicted = class_names where logits > 0" in capsys.readouterr().err


def test_a_label_without_positives_is_left_out_of_the_means(files, tmp_path, capsys):
    held_out, _ = files("held-out")
    test, _ = files("test", labels=np.tile([[0, 1, 0, 0], [1, 0, 0, 1]], (300, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert calibrate(held_out, "--test", test, "--out", tmp_path / "out", "--json") == 0
    printed = capsys.readouterr()
    assert "test: label rash has no positive or no negative sample" in printed.err
    assert 0 < json.loads(printed.out)["test"]["after"]["average_precision"] <= 1


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"labels": np.full((600, 4), 2)}, (), "label 0 of row 0 is 2, not 0 or 1"),
        ({"labels": np.zeros(600, int)}, (), "must have shape (samples, labels) and entries 0 and 1"),
        ({"labels": np.zeros((600, 3), int)}, (), "logits have shape (600, 4), but labels (600, 3)"),
        ({"logits": np.full((600, 4), np.nan)}, (), "logits of row 0 contain NaN"),
        ({"head_weight": np.ones((3, 3))}, (), "head_weight must have shape (4, D), not (3, 3)"),
        ({"head_bias": np.ones(3)}, (), "head_bias must have shape (4,), not (3,)"),
        ({"class_names": NAMES[:3]}, (), "3 class_names for 4 labels"),
        ({}, ("--target-prior", "uniform"), "choose from: train, balanced"),
        ({}, ("--target-prior", "1.5"), "target_prevalence must be above 0 and below 1, not 1.5"),
        ({}, ("--target-prior", "missing.csv"), "missing.csv does not exist"),
        ({}, ("--then", "temperature"), "--then does not apply to --method multilabel"),
        ({}, ("--keep", "rash"), "--keep does not apply to --method multilabel"),
        ({}, ("--test", "{other}"), "has other labels than"),
        ({}, ("--views", "2"), "--views applies only to run folders"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(files, tmp_path, capsys, changes, words, message):
    held_out, _ = files("held-out", **changes)
    other, _ = files("other", class_names=["a", "b", "c", "d"])
    given = [word.format(other=other) for word in words]
    assert calibrate(held_out, "--out", tmp_path / "out", *given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_other_methods_name_the_one_for_several_labels(files, tmp_path, capsys):
    held_out, _ = files("held-out")
    assert main(["calibrate", held_out, "--out", str(tmp_path / "out")]) == 2
    assert "for several labels per sample use MultiLabelCalibration (longtail calibrate --method multilabel)" in (
        capsys.readouterr().err
    )
    assert calibrate(tmp_path) == 2
    assert "--method multilabel takes saved logits (.npz)" in capsys.readouterr().err
