"""Class frequencies estimated from images, prediction sets, and long-tailed test splits, from the command line."""

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from longtail.cli.main import main
from longtail.data import open_splits
from longtail.data.imbalance import profile_indices
from longtail.runs.folder import Run


@pytest.fixture(scope="module")
def halo(digits_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated") / "halo"
    run = shutil.copytree(digits_run, tmp_path_factory.mktemp("run") / "digits")
    words = ["calibrate", str(run), "--method", "halo", "--out", str(folder), "--device", "cpu", "--quiet"]
    assert main(words) == 0
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A long-tailed subset of the test images, 30 to 3 of a class."""
    test, folder = open_splits("digits-lt").test, tmp_path_factory.mktemp("photos")
    for index in profile_indices(test.labels.numpy(), 10):
        Image.fromarray(test.pixels[index, 0].numpy()).save(folder / f"{test.labels[index]}-{index}.png")
    return folder


def predict(capsys, *words):
    assert main(["predict", *map(str, words), "--device", "cpu", "--json", "--top", "10"]) == 0
    return json.loads(capsys.readouterr().out)


def test_predict_estimates_the_frequencies_of_the_images(halo, photos, capsys):
    estimated = predict(capsys, halo, photos, "--target-prior", "estimate")
    power = estimated["target_prior"]["power"]
    assert estimated["target_prior"]["low"] < power < estimated["target_prior"]["high"]
    assert 0 < power < 1.5  # as imbalanced as 10, the training images as 25
    given = predict(capsys, halo, photos, "--target-prior", str(power))
    assert estimated["images"] == given["images"]
    assert main(["predict", str(halo), str(photos), "--target-prior", "estimate", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert f"the training prior to the power {power:.2f} (95 % interval" in text
    assert "predictions changed" in text


def test_predict_gives_sets_that_contain_the_true_class(halo, photos, capsys, tmp_path):
    images = predict(capsys, halo, photos, "--coverage", "0.9")["images"]
    hit = [image["path"].rsplit("/", 1)[-1][0] in image["set"] for image in images]
    assert np.mean(hit) > 0.8
    assert all(image["classes"][0]["name"] == image["set"][0] for image in images)
    wider = predict(capsys, halo, photos, "--coverage", "0.95", "--target-prior", "train")["images"]
    for narrow, wide in zip(images, wider, strict=True):
        assert set(narrow["set"]) <= set(wide["set"])
    words = ["predict", str(halo), str(photos), "--coverage", "0.9", "--out", str(tmp_path / "sets.csv")]
    assert main([*words, "--device", "cpu", "--quiet"]) == 0
    with (tmp_path / "sets.csv").open() as file:
        for row, image in zip(csv.DictReader(file), images, strict=True):
            assert row["set"].split("|") == image["set"]
            assert int(row["set_size"]) == len(image["set"])
    assert main([*words[:-2], "--device", "cpu"]) == 0
    assert "nothing is promised for each class: 9 of 10 classes had fewer than 10" in " ".join(
        capsys.readouterr().err.split()
    )


def test_evaluate_scores_long_tailed_test_splits(halo, capsys):
    run = Run.open(halo)
    outputs = run.outputs("test")
    accuracy = {}
    for order in ("forward", "backward"):
        order_of_classes = np.argsort(-run.class_counts, kind="stable")
        rows = profile_indices(outputs.labels, 10, order, class_order=order_of_classes)
        labels, logits = outputs.labels[rows], np.asarray(outputs.logits)[rows]
        for target in (None, "uniform", "known", "estimate"):
            words = ["evaluate", str(halo), "--test-profile", f"{order}:10", "--device", "cpu", "--json"]
            assert main([*words, *([] if target is None else ["--target-prior", target])]) == 0
            accuracy[order, target] = json.loads(capsys.readouterr().out)["top1"]
        own = np.log(np.bincount(labels))
        assert accuracy[order, "known"] == pytest.approx(((logits + own).argmax(1) == labels).mean())
        assert accuracy[order, None] == accuracy[order, "uniform"] == pytest.approx((logits.argmax(1) == labels).mean())
        record = json.loads((halo / f"metrics-test-{order}-10-prior-estimate.json").read_text())
        power = record["target_prior"]["power"]
        moved = logits + power * np.log(run.class_counts)
        assert accuracy[order, "estimate"] == pytest.approx((moved.argmax(1) == labels).mean())
        assert record["test_profile"] == f"{order}-10"
        assert record["samples"] == len(rows)
    assert sum(accuracy[order, "known"] - accuracy[order, "uniform"] for order in ("forward", "backward")) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "{halo}", "{photos}", "--coverage", "1"], "coverage must be a number, above 0 and below 1, not 1"),
        (["predict", "{halo}", "{photos}", "--coverage", "0.999"], "needs more unseen samples than the"),
        (["predict", "{run}", "{photos}", "--coverage", "0.9"], "prediction sets need a calibration with 30 held-out"),
        (["predict", "{run}", "{photos}", "--target-prior", "estimate"], "needs a model calibrated with halo"),
        (["predict", "{halo}", "{photo}", "--target-prior", "estimate"], "30 samples at least, not from 1;"),
        (["evaluate", "{halo}", "--test-profile", "sideways:10"], "--test-profile is forward:N or backward:N"),
        (["evaluate", "{halo}", "--test-profile", "forward:1000"], "use a smaller imbalance factor"),
        (["evaluate", "{run}", "--target-prior", "estimate"], "needs a model calibrated with halo"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(halo, digits_copy, photos, tmp_path, capsys, words, message):
    names = {"halo": halo, "run": digits_copy, "photos": photos, "photo": next(photos.iterdir())}
    out = ["--out", str(tmp_path / "out.csv")] if words[0] == "predict" else []
    before = sorted(path for folder in (halo, digits_copy) for path in folder.glob("*.json"))
    assert main([*(word.format(**names) for word in words), *out, "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "out.csv").exists()
    assert sorted(path for folder in (halo, digits_copy) for path in folder.glob("*.json")) == before


def test_a_calibration_of_another_number_of_classes_is_damaged(halo, photos, tmp_path, capsys):
    shutil.copytree(halo, tmp_path / "halo")
    path = tmp_path / "halo" / "calibration.json"
    for name, wrong in (("log_target_", [0.0] * 9), ("log_target_", "uniform"), ("prior_check_", {"samples": 3})):
        values = json.loads((halo / "calibration.json").read_text())
        path.write_text(json.dumps({**values, name: wrong}))
        assert main(["predict", str(tmp_path / "halo"), str(photos), "--target-prior", "train"]) == 2
        assert "calibration.json is damaged" in capsys.readouterr().err
