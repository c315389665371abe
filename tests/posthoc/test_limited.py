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
from longtail.posthoc.held_out import out_of_fold_logits, stratified_folds
from longtail.posthoc.inputs import from_outputs

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


def test_the_strength_of_lowest_cost_is_taken(tmp_path):
    costs = np.where(np.eye(4), 0.0, 1.0)
    costs[3], costs[3, 3] = 40.0, 0.0  # a dog that is missed
    file = tmp_path / "costs.csv"
    turned = (2, 0, 3, 1)  # the order in a file does not matter
    lines = [";".join([NAMES[i], *(str(costs[i, j]) for j in turned[::-1])]) for i in turned]
    file.write_text("\n".join([";".join(["true", *(NAMES[j] for j in turned[::-1])]), *lines]))
    calibrated = LogitAdjustment(tau=2).fit(TRAIN).transform(HELD_OUT)

    def cost(strength):
        predicted = ((1 - strength) * HELD_OUT.logits + strength * calibrated).argmax(1)
        own = [costs[k, predicted[HELD_OUT.labels == k]].mean() for k in range(4)]
        return float(np.average(own, weights=COUNTS))

    by_strength = {strength: cost(strength) for strength in np.linspace(0, 1, 21).round(2)}
    best = min(by_strength, key=by_strength.get)
    assert 0 < best < 1
    for given in (costs, str(file)):
        limited = Limited(LogitAdjustment(tau=2), costs=given).fit(TRAIN, validation=HELD_OUT)
        assert limited.strength_ == best
        assert limited.cost_change_[0] == pytest.approx(by_strength[best] - by_strength[0])
        assert limited.cost_change_[1] < limited.cost_change_[0] < limited.cost_change_[2]
        assert f"cost per image {by_strength[0]:.3g} → {by_strength[best]:.3g} (" in limited.notes()[-1]
    # Where all mistakes cost the same, top-1 at the training prior decides, and this model needs no change for it.
    equal = Limited(LogitAdjustment(tau=2), costs=1 - np.eye(4)).fit(TRAIN, validation=HELD_OUT)
    assert natural(equal.transform(HELD_OUT), HELD_OUT) >= natural(HELD_OUT.logits, HELD_OUT)
    assert equal.strength_ < best


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no costs; it needs a first line of predicted classes"),
        ("x,ant,bee,cat,dog\nant,0,1,1,1\nbee,1,0,1,1\ncat,1,1,0,1\n", "has no row for class dog"),
        ("x,ant,bee,cat,cow\n" + "".join(f"{name},0,0,0,0\n" for name in NAMES), "there is no class cow"),
        ("x,ant,bee,cat,dog\n" + "".join(f"{name},0,0,0,0\n" for name in NAMES), "no mistake costs anything"),
        ("x,ant,bee,cat,dog\n" + "".join(f"{name},1,1,1\n" for name in NAMES), "class ant has 3 costs for 4"),
        ("x,ant,bee,cat,dog\n" + "".join(f"{name},0,1,1,1\n" for name in NAMES), "bee costs more if it is recognised"),
        ("x,ant,bee,cat,dog\n" + "".join(f"{name},0,1,1,dear\n" for name in NAMES), "ant taken for dog costs 'dear'"),
        ("x,ant,bee,cat,dog\n" + "".join(f"{name},0,1,-2,0\n" for name in NAMES), "ant taken for cat costs -2"),
        ("x,ant,bee,cat,dog\n" + "".join(f"{name},0,1,nan,0\n" for name in NAMES), "ant taken for cat costs nan"),
        ("x,ant,bee,cat,dog\n" + "ant,0,1,1,1\n" * 5, "two rows for class ant"),
        ("\x00\x01\x02", "has no costs"),
    ],
)
def test_a_table_of_costs_that_is_none_is_refused_in_one_line(tmp_path, capsys, text, message):
    for outputs in (TRAIN, HELD_OUT):
        outputs.save(tmp_path / f"{outputs.split}.safetensors")
    (tmp_path / "costs.csv").write_text(text)
    words = ["calibrate", f"{tmp_path}/train.safetensors", "--validation", f"{tmp_path}/validation.safetensors"]
    assert main([*words, "--method=marc", "--costs", f"{tmp_path}/costs.csv", "--out", f"{tmp_path}/out"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


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


def test_a_method_fitted_on_held_out_samples_is_scored_out_of_fold():
    limited = Limited(HALO(), most_loss=2).fit(TRAIN, validation=HELD_OUT)
    halo, held_out = HALO().fit(TRAIN, validation=HELD_OUT), from_outputs(HELD_OUT)
    folds = stratified_folds(HELD_OUT.labels, 5, seed=0)
    calibrated = out_of_fold_logits(halo, from_outputs(TRAIN), held_out, folds).numpy()
    mixed = (1 - limited.strength_) * HELD_OUT.logits + limited.strength_ * calibrated
    change = natural(mixed, HELD_OUT) - natural(HELD_OUT.logits, HELD_OUT)
    assert limited.natural_change_[0] == pytest.approx(change, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "validation", "message"),
    [
        (Limited(MARC(), most_loss=2), None, "chosen on images that the network has not seen, but there are none"),
        (Limited(MARC(), keep=["cow"]), HELD_OUT, "unknown class 'cow'"),
        (Limited(MARC(), strength=1.2), HELD_OUT, "strength must be a number, at least 0 and at most 1"),
        (Limited(MARC(), strength=0.5, most_loss=1), HELD_OUT, "give only one"),
        (Limited(MARC(), most_loss=-1), HELD_OUT, "most_loss must be a number"),
        (Limited(MARC(), best="balanced", costs=1 - np.eye(4)), HELD_OUT, "either by best or by costs"),
        (Limited(MARC(), costs=1 - np.eye(3)), HELD_OUT, "a row and a column per class"),
        (Limited(MARC(), costs="nowhere.csv"), HELD_OUT, "nowhere.csv does not exist"),
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
