import json
from dataclasses import replace

import numpy as np
import pytest

from longtail import HALO, MARC, Outputs
from longtail.cli.commands.diagnose import Diagnose, show
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment
from longtail.posthoc.candidates import try_candidates
from longtail.posthoc.inputs import from_outputs
from longtail.tasks.diagnose import diagnose


def outputs_of(data, split):
    counts = np.bincount(data["y"])
    logits, y = (data["views"][0], data["y"]) if split == "train" else (data["test"], data["test_y"])
    return Outputs(y, counts, logits=logits, head_weight=data["weight"], head_bias=data["bias"], split=split)


def test_a_biased_network_is_recognised(cifar_features, tmp_path, capsys):
    train, held_out = (outputs_of(cifar_features, split) for split in ("train", "test"))
    diagnosis = diagnose(held_out, train)
    assert diagnosis.biased
    assert diagnosis.before.correlation["margins"] > 0.7
    delivered = HALO().fit(train, validation=held_out).predict(held_out.logits) == held_out.labels
    assert diagnosis.method == "halo"
    assert diagnosis.gain.value == pytest.approx(delivered.mean() - 0.6896, abs=3e-3)  # fitted in folds
    gains = {tried.method: tried.gain for tried in diagnosis.tried}
    repaired = (MARC().fit(train).predict(held_out.logits) == held_out.labels).mean()
    assert gains["marc"].value == pytest.approx(repaired - 0.6896, abs=1e-3)
    assert 0.05 < diagnosis.gain.low < diagnosis.gain.high < 0.12
    (tmp_path / "my run").mkdir()
    show(Diagnose(source=tmp_path / "my run"), diagnosis)
    printed = capsys.readouterr()
    assert f"next: longtail calibrate '{tmp_path}/my run' --method halo" in printed.err
    assert "HALO ←" in printed.out
    # The price, in the table and in the recommendation.
    right = HALO().fit(train, validation=held_out).predict(held_out.logits) == held_out.labels
    shares = np.array([right[held_out.labels == label].mean() for label in range(10)])
    price = next(tried.natural for tried in diagnosis.tried if tried.method == "halo")
    assert price == pytest.approx(train.class_counts @ shares / train.class_counts.sum(), abs=5e-3)
    assert diagnosis.tried[0].natural == diagnosis.before.metrics.natural > price
    told = f"{100 * diagnosis.tried[0].natural:.1f} → {100 * price:.1f}"
    assert f"(top-1 at the training prior: {told})" in diagnosis.sentences()
    assert f"{100 * price:.1f} │" in next(line for line in printed.out.splitlines() if "HALO ←" in line)
    assert "← what longtail calibrate takes" in " ".join(printed.out.split())
    assert diagnosis.tail_gain.value > diagnosis.gain.value
    text = diagnosis.sentences()
    assert text.count(". ") == 1
    assert "is long-tail biased" in text
    json.dumps(diagnosis.to_dict(), allow_nan=False)


def test_without_training_outputs_parts_of_the_held_out_ones_serve(cifar_features):
    held_out = outputs_of(cifar_features, "test")
    diagnosis = diagnose(held_out)
    assert diagnosis.method == "marc"
    assert diagnosis.fitted == "fitted on held-out images"
    assert diagnosis.biased
    assert diagnosis.gain.low > 0.05


def test_cross_fitting_never_scores_a_sample_with_its_own_label():
    """Labels that are pure chance show no gain, though a fit on all of them would."""
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 3
    outputs = Outputs(labels, np.array([300, 30, 3]), logits=rng.normal(size=(300, 3)))
    trial = try_candidates(None, from_outputs(outputs), "uniform")
    marc = next(candidate for candidate in trial.candidates if candidate.name == "marc")
    assert marc.hits.mean() == pytest.approx(1 / 3, abs=0.08)
    assert trial.mean(marc) < np.log(1 / 3) + 0.01


def test_a_repaired_network_is_left_alone(cifar_features):
    data = cifar_features
    held_out = outputs_of(data, "test")
    train = outputs_of(data, "train")
    marc = MARC(gamma=1.5).fit(train)
    repaired = [Outputs(o.labels, o.class_counts, logits=marc.transform(o), split=o.split) for o in (held_out, train)]
    diagnosis = diagnose(*repaired)
    assert not diagnosis.biased
    assert "Keep the classifier unchanged" in diagnosis.sentences()


@pytest.mark.parametrize(
    ("labels", "counts", "message"),
    [
        ([0, 1, 2, 2], [5, 3, 1], "class 0 has 1 held-out samples; at least 2"),
        ([0, 0, 1, 1], [5, 5], "there is no long tail"),
    ],
)
def test_what_cannot_be_diagnosed_is_said(labels, counts, message):
    logits = np.random.default_rng(0).normal(size=(4, len(counts)))
    with pytest.raises(UserError, match=message):
        diagnose(Outputs(np.array(labels), np.array(counts), logits=logits))


def test_command(capsys, digits_copy, tmp_path, cifar_features):
    assert main(["diagnose", str(digits_copy), "--split", "test"]) == 0
    captured = capsys.readouterr()
    assert "rank correlation" in captured.out
    assert "long-tail biased" in captured.out
    data = cifar_features
    np.savez(tmp_path / "train.npz", logits=data["views"][0], labels=data["y"], head_weight=data["weight"])
    np.savez(tmp_path / "held.npz", logits=data["test"], labels=data["test_y"])
    words = ["diagnose", str(tmp_path / "held.npz"), "--train", str(tmp_path / "train.npz"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["biased"]
    assert main(["diagnose", str(digits_copy), "--train", str(tmp_path / "train.npz")]) == 2
    assert "--train applies only to saved logits, and" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "held.npz")]) == 2
    assert "has no class_counts (K,), the training samples per class; add them" in capsys.readouterr().err


def test_a_class_that_is_ruled_out_and_a_fit_on_test_images_are_said(cifar_features, tmp_path, capsys):
    train, held_out = (outputs_of(cifar_features, split) for split in ("train", "test"))
    weight = np.where(np.arange(10)[:, None] == 3, 0, cifar_features["weight"])
    with pytest.raises(UserError, match="class 3 in the head is zero: the class is never predicted"):
        diagnose(replace(held_out, head_weight=weight), train)
    show(Diagnose(source=tmp_path), diagnose(held_out, train))
    fitted_there = "calibrate fits HALO on validation images (longtail train --validation 0.1), not on the test images"
    assert fitted_there in " ".join(capsys.readouterr().err.split())
    show(Diagnose(source=tmp_path), diagnose(replace(held_out, split="validation"), train))
    assert "calibrate fits HALO" not in capsys.readouterr().err


def draw(rng, counts, margin, noise, bias, split):
    """Outputs of a made-up model of known bias."""
    labels = np.repeat(np.arange(len(counts)), counts)
    logits = margin * (np.eye(len(counts))[labels] + noise * rng.normal(size=(len(labels), len(counts)))) + bias
    return Outputs(labels, TRAINED_ON, logits=logits.astype(np.float32), split=split)


TRAINED_ON = np.array([300, 140, 60, 30, 14])


def test_the_interval_covers_the_gain_that_calibration_delivers():
    """Over many models, biased and not, sure of their training images to different degrees."""
    rng = np.random.default_rng(0)
    methods = {"marc": MARC, "halo": HALO, "logit-adjustment": LogitAdjustment}
    covered, errors = [], []
    for _ in range(100):
        margin, noise, easier = rng.uniform(1, 4), rng.uniform(0.4, 1), rng.uniform(1, 3)
        bias = rng.uniform(0, 1.5) * np.log(TRAINED_ON / TRAINED_ON.sum()) + 0.3 * rng.normal(size=5)
        train = draw(rng, TRAINED_ON, margin * easier, noise / easier, bias, "train")
        held_out = draw(rng, np.maximum(TRAINED_ON // 2, 10), margin, noise, bias, "validation")
        test = draw(rng, np.full(5, 2000), margin, noise, bias, "test")
        diagnosis = diagnose(held_out, train)
        method = methods[diagnosis.nearest]().fit(train, validation=held_out)
        delivered = method.score(test) - (test.logits.argmax(1) == test.labels).mean()
        covered.append(diagnosis.gain.low <= delivered <= diagnosis.gain.high)
        errors.append(diagnosis.gain.value - delivered)
    assert 0.92 <= np.mean(covered) <= 0.99
    assert abs(np.mean(errors)) < 0.01


def test_very_few_held_out_samples_are_said():
    """One more correct sample of a class with two raises the balanced accuracy of four classes by 12.5 points."""
    labels = np.array([0] * 40 + [1] * 20 + [2, 2, 3, 3])
    outputs = Outputs(labels, np.array([400, 200, 10, 9]), logits=np.eye(4)[labels] + np.array([1.5, 0.5, 0, 0]))
    diagnosis = diagnose(outputs)
    said = "2 classes have only 2 held-out samples: a single sample moves balanced accuracy by 12.5 points."
    assert str(diagnosis).endswith(said)
    assert -1 <= diagnosis.tail_gain.low <= diagnosis.tail_gain.value <= diagnosis.tail_gain.high <= 1


def test_classes_without_held_out_samples_are_named():
    rng = np.random.default_rng(0)
    bias = np.log(TRAINED_ON / TRAINED_ON.sum())
    train = draw(rng, TRAINED_ON, 2, 0.7, bias, "train")
    held_out = draw(rng, np.array([50, 0, 20, 10, 0]), 2, 0.7, bias, "validation")
    diagnosis = diagnose(replace(held_out, class_names=("a", "b", "c", "d", "e")), train)
    assert diagnosis.missing == diagnosis.to_dict()["missing"] == ["b", "e"]
    assert diagnosis.sentences().endswith("No held-out samples of class b, e: nothing was measured on them.")
    only_head = draw(rng, np.array([50, 20, 0, 0, 0]), 2, 0.7, bias, "validation")
    with pytest.raises(UserError, match=r"no sample of a tail class; use another split \(--split test\), or hold out"):
        diagnose(only_head, train)
    assert "nothing was measured" not in diagnose(draw(rng, TRAINED_ON, 2, 0.7, bias, "validation"), train).sentences()
