import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail.data.splits import statistics
from longtail.exports.card import model_card
from longtail.metrics.table import SCORES
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run


def test_the_folder_is_a_run_that_scores_the_same(digits_copy, tmp_path):
    folder, scores = calibrate_run(Run.open(digits_copy), longtail.MARC(), "marc")
    longtail.export(folder, tmp_path / "shared", "safetensors")
    metrics, run, _ = evaluate_run(tmp_path / "shared", device="cpu")
    assert metrics.confusion == next(score for score in scores if score.split == "test").after.confusion
    assert str(tmp_path) not in (tmp_path / "shared" / "run.json").read_text()
    card = (tmp_path / "shared" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: longtail\n")
    for score in scores:
        for name, metrics in (("stage one", score.before), ("calibrated", score.after)):
            cells = [known.show(getattr(metrics, key)) for key, known in SCORES.items()]
            assert f"| {score.split} | {name} | {' | '.join(cells)} |" in card
    assert "Stage two: MARC (Wang et al." in card
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    fields = yaml.safe_load(card.split("---")[1])
    (model,) = fields["model-index"]
    assert [result["dataset"]["split"] for result in model["results"]] == [score.split for score in scores]
    for result, score in zip(model["results"], scores, strict=True):
        values = {metric["name"]: metric["value"] for metric in result["metrics"]}
        assert values["Balanced accuracy"] == pytest.approx(score.after.balanced, abs=1e-6)
    for label, count in enumerate(run.group_counts):
        assert f"| {label} | {label} | {count} |" in card


def test_the_code_of_the_card_runs(digits_run, tmp_path, monkeypatch):
    longtail.export(digits_run, tmp_path / "shared", "safetensors")
    monkeypatch.chdir(tmp_path / "shared")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "shared" / "README.md").read_text(), re.DOTALL)
    pixels = longtail.data.open_splits("digits-lt").test.pixels[:3]
    names = {"images": list(pixels[:, 0].numpy())}
    exec(code, names)
    # The last sentence of the section, done by hand.
    mean, std = statistics(Run.open(digits_run).config)
    logits = names["model"].network((pixels / 255 - torch.tensor(mean)) / torch.tensor(std))
    np.testing.assert_allclose(names["found"].probabilities, logits.detach().softmax(1), atol=1e-5)


def test_a_plain_run_shows_only_scores_of_its_own_weights(digits_copy):
    assert "| validation | stage one | " in model_card(Run.open(digits_copy))
    assert "| test | " not in model_card(Run.open(digits_copy))
    evaluate_run(digits_copy, device="cpu")
    assert "| test | stage one | " in model_card(Run.open(digits_copy))
    path = digits_copy / "metrics-test.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "another"}))
    assert "| test | " not in model_card(Run.open(digits_copy))


def test_many_classes_are_shortened_and_names_cannot_break_the_table(tmp_path):
    for label in range(120):
        folder = tmp_path / "photos" / "train" / f"class|{label:03d}"
        folder.mkdir(parents=True)
        for number in range(3 if label == 7 else 2):
            Image.new("RGB", (16, 16), (label, number, 0)).save(folder / f"{number}.png")
    config = longtail.TrainConfig(
        data="folder", root=str(tmp_path / "photos"), backbone="resnet8", image_size=16, iterations=1, validation=0,
        workers=0, device="cpu",
    )  # fmt: skip
    longtail.train(config, tmp_path / "run")
    card = model_card(Run.open(tmp_path / "run"))
    assert "| 7 | class\\|007 | 3 |\n" in card
    assert "and 20 smaller classes" in card
    assert "Not measured yet" in card
