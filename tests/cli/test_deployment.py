"""Class frequencies of new images (given or estimated), prediction sets, long-tailed test splits: the commands."""

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


def probabilities(capsys, *words):
    """(N, K) as predict prints them, in the order of the classes."""
    rows = [
        sorted((one["name"], one["probability"]) for one in image["classes"])
        for image in predict(capsys, *words)["images"]
    ]
    return np.array([[value for _, value in row] for row in rows])


def test_predict_changes_the_target_prior_without_another_fit(digits_copy, photos, tmp_path, capsys):
    prior = tmp_path / "prior.csv"
    prior.write_text("".join(f"{digit},{10 - digit}\n" for digit in range(10)))
    words = ["calibrate", str(digits_copy), "--method", "halo", "--device", "cpu", "--quiet"]
    assert main(words) == 0
    for target in ("train", "0.5", str(prior)):
        assert main([*words, "--target-prior", target, "--out", str(tmp_path / "out"), "--overwrite"]) == 0
        fitted = probabilities(capsys, tmp_path / "out", photos)
        changed = probabilities(capsys, digits_copy / "halo", photos, "--target-prior", target)
        np.testing.assert_allclose(changed, fitted, rtol=1e-3, atol=1e-5)
        # From a model for another target prior back to equal classes.
        back = probabilities(capsys, tmp_path / "out", photos, "--target-prior", "uniform")
        np.testing.assert_allclose(back, probabilities(capsys, digits_copy / "halo", photos), rtol=1e-3, atol=1e-5)


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
        (["predict", "{run}", "{photos}", "--target-prior", "train"], "needs a model calibrated with halo"),
        (
            ["calibrate", "{run}", "--method", "marc", "--target-prior", "0"],
            "--target-prior applies to --method halo and",
        ),
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


@pytest.mark.parametrize("top", [1, 3, 10])
def test_predictions_take_one_line_per_image_at_80_columns(digits_run, photos, tmp_path, monkeypatch, capsys, top):
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "a-folder-with-a-long-name" / "of-photographs" / "that-were-taken-in-summer"
    folder.mkdir(parents=True)
    for path in sorted(photos.iterdir())[:10]:
        shutil.copyfile(path, folder / f"IMG_{path.stem}-original.png")
    assert main(["predict", str(digits_run), str(folder), "--top", str(top), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    images = len(list(folder.iterdir()))
    assert sum(line.split()[0].endswith("-original.png") for line in lines if line.strip()) == images


@pytest.mark.parametrize("miss", [7, 400])
def test_costs_decide_also_beyond_equal_classes(tmp_path, capsys, miss):
    """One event in 50; its miss costs less, or much more, than makes both classes count the same."""
    rng = np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        labels = (rng.random(4000) < 0.02).astype(int)
        margin = 1.5 * rng.normal(size=4000) + 3 * labels - 5
        np.savez(tmp_path / f"{split}.npz", logits=np.stack([-margin / 2, margin / 2], 1), labels=labels)
    (tmp_path / "costs.csv").write_text(f"true,0,1\n0,0,1\n1,{miss},0\n")

    def cost(*more):
        files = [f"--{split}={tmp_path / split}.npz" for split in ("validation", "test")]
        out = ["--out", str(tmp_path / "out"), "--overwrite", "--method", "halo", "--quiet", *files]
        assert main(["calibrate", str(tmp_path / "train.npz"), *out, *more]) == 0
        scores = json.loads((tmp_path / "out" / "before-after-test.json").read_text())["after"]
        (_, alarms), (misses, _) = scores["confusion"]
        return alarms + miss * misses

    least = cost("--costs", str(tmp_path / "costs.csv"))
    assert least < 0.9 * min(cost("--target-prior", prior) for prior in ("uniform", "train"))


def test_evaluate_prints_the_cost_per_image(digits_copy, tmp_path, capsys):
    costs = np.where(np.eye(10), 0, np.arange(1, 11)[:, None])
    rows = [",".join(map(str, [digit, *costs[digit]])) for digit in range(10)]
    (tmp_path / "costs.csv").write_text("\n".join(["true,0,1,2,3,4,5,6,7,8,9", *rows]))
    words = ["evaluate", str(digits_copy), "--device", "cpu", "--json", "--costs", str(tmp_path / "costs.csv")]
    assert main(words) == 0
    scores = json.loads(capsys.readouterr().out)
    of_class = [(1 - accuracy) * (digit + 1) for digit, accuracy in enumerate(scores["per_class"])]
    counts = Run.open(digits_copy).class_counts
    assert scores["cost"] == pytest.approx(np.average(of_class, weights=counts))
    (tmp_path / "costs.csv").write_text("true,0,1\n0,0,1\n1,1,0\n")
    assert main(words) == 2
    assert "no row for class 2" in capsys.readouterr().err
