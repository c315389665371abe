"""A calibration that is applied only as far as its price allows."""

import numpy as np
import pytest
import torch
from torch import nn

from longtail import HALO, MARC, Outputs
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.metrics.intervals import class_differences
from longtail.metrics.scores import evaluate
from longtail.posthoc import Limited, LogitAdjustment, TemperatureScaling, Tempered

COUNTS = np.array([900, 300, 90, 30])
NAMES = ("ant", "bee", "cat", "dog")


def samples(seed, counts, split="train"):
    """Features, and the logits of a head that expects classes as often as in training."""
    rng, weight = np.random.default_rng(seed), np.random.default_rng(9).normal(size=(4, 6))
    labels = np.repeat(np.arange(4), counts)
    features = (weight[labels] + 1.5 * rng.normal(size=(len(labels), 6))).astype(np.float32)
    bias = 2.0 * np.log(COUNTS / COUNTS.sum())
    logits = (features @ weight.T + bias).astype(np.float32)
    head = {"head_weight": weight.astype(np.float32), "head_bias": bias.astype(np.float32)}
    return Outputs(labels, COUNTS, logits=logits, features=features, split=split, class_names=NAMES, **head)


TRAIN, HELD_OUT, TEST = samples(0, COUNTS), samples(1, COUNTS // 3, "validation"), samples(2, [400] * 4, "test")


def natural(logits, outputs):
    """Top-1 at the training prior, plainly."""
    hits = logits.argmax(1) == outputs.labels
    return float(sum(COUNTS[k] / COUNTS.sum() * hits[outputs.labels == k].mean() for k in range(4)))


def test_the_largest_strength_within_the_limit_is_taken():
    full = LogitAdjustment(tau=2).fit(TRAIN)
    calibrated = full.transform(HELD_OUT)

    def loss(strength):
        mixed = (1 - strength) * HELD_OUT.logits + strength * calibrated
        return 100 * (natural(HELD_OUT.logits, HELD_OUT) - natural(mixed, HELD_OUT))

    assert loss(1) > 8
    for most in (0.5, 2, 5, 50):
        limited = Limited(LogitAdjustment(tau=2), most_loss=most).fit(TRAIN, validation=HELD_OUT)
        allowed = [strength for strength in np.linspace(0, 1, 21).round(2) if loss(strength) <= most]
        assert limited.strength_ == max(allowed)
        assert -100 * limited.natural_change_[0] == pytest.approx(loss(limited.strength_), abs=1e-6)
        assert limited.natural_change_[1] < limited.natural_change_[0] < limited.natural_change_[2]
    assert limited.strength_ == 1  # a loss of 50 points is no limit
    np.testing.assert_allclose(limited.transform(TEST), full.transform(TEST), rtol=1e-6)
    assert Limited(LogitAdjustment(tau=2), most_loss=0).fit(TRAIN, validation=HELD_OUT).strength_ < 0.3


def test_a_class_that_is_to_be_kept_is_kept():
    full = LogitAdjustment(tau=2).fit(TRAIN)
    kept = Limited(LogitAdjustment(tau=2), keep=["ant"]).fit(TRAIN, validation=HELD_OUT)
    assert 0 < kept.strength_ < 1
    own = HELD_OUT.labels == 0
    before, calibrated = HELD_OUT.logits[own].argmax(1) == 0, full.transform(HELD_OUT)[own]
    for strength, falls in ((kept.strength_, False), (kept.strength_ + 0.05, True)):
        hits = ((1 - strength) * HELD_OUT.logits[own] + strength * calibrated).argmax(1) == 0
        change = class_differences(hits, before, np.zeros(own.sum(), dtype=int), 1)
        assert (change.high[0] < 0) == falls
    scores = [evaluate(logits, TEST.labels, COUNTS) for logits in (kept.transform(TEST), full.transform(TEST))]
    assert scores[0].per_class[0] > scores[1].per_class[0] + 0.05


def test_macro_f1_is_the_best_of_all_strengths():
    balanced = samples(5, [90] * 4, "validation")
    limited = Limited(LogitAdjustment(tau=6), best="macro_f1").fit(TRAIN, validation=balanced)
    calibrated = LogitAdjustment(tau=6).fit(TRAIN).transform(balanced)
    scores = {
        strength: evaluate((1 - strength) * balanced.logits + strength * calibrated, balanced.labels, COUNTS).macro_f1
        for strength in np.linspace(0, 1, 21).round(2)
    }
    assert scores[limited.strength_] == pytest.approx(max(scores.values()))
    assert 0 < limited.strength_ < 1
    assert "Macro F1" in limited.notes()[-1]


@pytest.mark.parametrize("method", [MARC(), HALO(), Tempered(MARC())])
def test_it_folds_into_the_head(method):
    limited = Limited(method, strength=0.4).fit(TRAIN, validation=HELD_OUT)
    head = nn.Linear(6, 4)
    head.load_state_dict({"weight": torch.tensor(TRAIN.head_weight), "bias": torch.tensor(TRAIN.head_bias)})
    with torch.no_grad():
        folded = limited.head(head)(torch.from_numpy(TEST.features)).numpy()
    expected = 0.6 * TEST.logits + 0.4 * limited.method.transform(TEST)
    for found in (folded, limited.transform(TEST)):
        np.testing.assert_allclose(
            found - found.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=2e-4
        )


def test_a_method_fitted_on_held_out_samples_is_scored_by_fits_that_have_not_seen_them(monkeypatch):
    seen = []
    refitted = HALO.refitted
    monkeypatch.setattr(
        HALO, "refitted", lambda self, data, kept: (seen.append(len(kept.labels)), refitted(self, data, kept))[1]
    )
    Limited(HALO(), most_loss=2).fit(TRAIN, validation=HELD_OUT)
    assert len(seen) == 5
    assert sum(seen) == 4 * len(HELD_OUT)


@pytest.mark.parametrize(
    ("method", "validation", "message"),
    [
        (Limited(MARC(), most_loss=2), None, "chosen on images that the network has not seen, but there are none"),
        (Limited(MARC(), keep=["cow"]), HELD_OUT, "unknown class 'cow'"),
        (Limited(MARC(), strength=1.2), HELD_OUT, "strength must be a number, at least 0 and at most 1"),
        (Limited(MARC(), strength=0.5, most_loss=1), HELD_OUT, "give only one"),
        (Limited(MARC(), most_loss=-1), HELD_OUT, "most_loss must be a number"),
        (Limited(Limited(MARC())), HELD_OUT, "a method that changes decisions"),
        (Limited(TemperatureScaling()), HELD_OUT, "a method that changes decisions"),
        (Limited(MARC(), keep=["dog"]), samples(3, [90, 30, 9, 0], "validation"), "no held-out image of class dog"),
    ],
)
def test_mistakes_are_refused(method, validation, message):
    with pytest.raises(UserError, match=message):
        method.fit(TRAIN, validation=validation)


def test_the_command_limits_the_loss_and_warns_of_a_large_class_that_is_lost(tmp_path, capsys):
    for outputs in (TRAIN, HELD_OUT, TEST):
        outputs.save(tmp_path / f"{outputs.split}.safetensors")
    words = ["calibrate", str(tmp_path / "train.safetensors"), "--method", "logit-adjustment", "--options", "tau", "6"]
    words += [
        word for split in ("validation", "test") for word in (f"--{split}", str(tmp_path / f"{split}.safetensors"))
    ]
    assert main([*words, "--out", str(tmp_path / "full")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "test: large classes are hardly recognised any more: ant (" in printed
    assert "--keep ant or --most-loss 3 applies Logit adjustment only in part" in printed
    assert main([*words, "--out", str(tmp_path / "limited"), "--most-loss", "3"]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "hardly recognised" not in printed
    assert "of 1, chosen on held-out images: top-1 at the training prior -" in printed
    assert main([*words, "--out", str(tmp_path / "both"), "--most-loss", "3", "--then", "temperature"]) == 0
    assert "Logit adjustment + temperature + limit, " in capsys.readouterr().err
