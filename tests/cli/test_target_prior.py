"""`--target-prior` of calibrate and predict: class frequencies of new images, without another fit."""

import json

import numpy as np
import pytest
from PIL import Image

from longtail.cli.main import main
from longtail.data import open_splits


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "a-folder-with-a-long-name" / "of-photographs" / "that-were-taken-in-summer"
    folder.mkdir(parents=True)
    for index, pixels in enumerate(open_splits("digits-lt").test.pixels[::60, 0].numpy()):
        Image.fromarray(pixels).save(folder / f"IMG_{index:05}-original.png")
    return folder


def probabilities(capsys, run, photos, *more):
    """(N, K) as predict prints them, in the order of the classes."""
    assert main(["predict", str(run), str(photos), "--top", "10", "--device", "cpu", "--json", *more]) == 0
    images = json.loads(capsys.readouterr().out)["images"]
    rows = [sorted((one["name"], one["probability"]) for one in image["classes"]) for image in images]
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["calibrate", "{run}", "--method", "marc", "--target-prior", "train"],
            "--target-prior applies to --method halo and probe, not to",
        ),
        (["predict", "{run}", "{photos}", "--target-prior", "train"], "needs a model calibrated with halo"),
    ],
)
def test_a_model_without_a_target_prior_is_refused(digits_copy, photos, capsys, words, message):
    assert main([word.format(run=digits_copy, photos=photos) for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("top", [1, 3, 10])
def test_predictions_take_one_line_per_image_at_80_columns(digits_copy, photos, monkeypatch, capsys, top):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["predict", str(digits_copy), str(photos), "--top", str(top), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    images = len(list(photos.iterdir()))
    assert sum(line.split()[0].endswith("-original.png") for line in lines if line.strip()) == images
