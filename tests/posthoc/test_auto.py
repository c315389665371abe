"""`Auto` chooses a method on held-out samples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from longtail.errors import UserError
from longtail.posthoc import Auto
from longtail.posthoc.auto import try_candidates
from longtail.posthoc.inputs import from_arrays


def samples(rng, counts, *, bias, margin=2.0, sure=1.0, unequal=0.0):
    """Logits of a model whose scores are right for equal priors, plus a bias (K,)."""
    y = np.repeat(np.arange(len(counts)), counts)
    own = margin * np.eye(len(counts))[y] * (1 + unequal * np.linspace(1, -1, len(counts)))
    logits = margin * (own + rng.normal(size=(len(y), len(counts)))) + np.asarray(bias)
    return sure * logits, y


COUNTS = np.array([400, 120, 40, 12])


def test_a_balanced_model_that_is_right_is_left_alone():
    left = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        train = samples(rng, [100] * 4, bias=0.0, sure=1.0 if seed % 2 else 3.0)
        held = samples(rng, [60] * 4, bias=0.0, sure=1.0 if seed % 2 else 3.0)
        left.append(Auto().fit(*train, validation=held).choice_ == "softmax")
    assert sum(left) >= 19


def test_a_biased_model_is_not():
    rng = np.random.default_rng(0)
    prior = np.log(COUNTS / COUNTS.sum())
    auto = Auto().fit(*samples(rng, COUNTS, bias=prior), validation=samples(rng, COUNTS // 4, bias=prior))
    assert auto.choice_ == "logit-adjustment"
    test, y = samples(rng, [500] * 4, bias=prior)
    assert (auto.predict(test) == y).mean() > (test.argmax(1) == y).mean() + 0.05


def test_what_training_images_do_not_show_is_found_on_unseen_ones():
    # Training scores of an interpolating model: sure of everything, no bias to be seen.
    rng = np.random.default_rng(1)
    y = np.repeat(np.arange(4), COUNTS)
    train = 20 * np.eye(4)[y] + rng.normal(size=(len(y), 4))
    prior = 2 * np.log(COUNTS / COUNTS.sum())
    held, labels = samples(rng, COUNTS // 2, bias=prior)
    auto = Auto().fit(train, y, validation=(held, labels))
    assert auto.choice_ in ("logit-adjustment", "halo")
    likelihood = {candidate.name: auto.trial_.mean(candidate) for candidate in auto.trial_.candidates}
    assert likelihood["marc"] < likelihood[auto.choice_] - 0.1


def test_the_likelihood_is_that_of_the_target_prior_recomputed():
    rng = np.random.default_rng(2)
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    train, held = (from_arrays(*samples(rng, counts, bias=0.0)) for counts in (COUNTS, COUNTS // 4))
    trial = try_candidates(train, held, weights)
    labels = held.labels.numpy()
    own = np.bincount(labels)
    expected = (weights / weights.sum())[labels] / own[labels]
    np.testing.assert_allclose(trial.weights, expected / expected.sum())
    first, second = trial.candidates[:2]
    change = first.likelihood - second.likelihood
    mean = np.average(change, weights=expected)
    error = np.sqrt((trial.weights**2 * (change - mean) ** 2).sum())
    np.testing.assert_allclose(trial.difference(first, second), (mean, error))


def test_the_head_gives_the_chosen_logits_and_never_a_class_that_never_occurs(cifar_features):
    real = cifar_features
    held = np.arange(0, 10000, 10)
    auto = Auto(target_prior=[0, 1, 1, 1, 1, 1, 1, 1, 1, 1]).fit(
        real["views"][0],
        real["y"],
        features=real["view_features"][0],
        weight_norms=real["norms"],
        validation=(real["test"][held], real["test_y"][held], real["test_features"][held]),
    )
    weight, bias = auto.fold(torch.from_numpy(real["weight"]), torch.from_numpy(real["bias"]))
    folded = (torch.from_numpy(real["test_features"]) @ weight.T + bias).numpy()
    logits = auto.transform(real["test"], real["test_features"])
    difference = folded[:, 1:] - logits[:, 1:]
    np.testing.assert_allclose(difference - difference.mean(1, keepdims=True), 0, atol=2e-3)
    assert 0 not in logits.argmax(1)
    assert 0 not in folded.argmax(1)


def test_without_unseen_samples_it_refuses():
    rng = np.random.default_rng(0)
    train = samples(rng, COUNTS, bias=0.0)
    with pytest.raises(UserError, match="there are none: hold out a part"):
        Auto().fit(*train)
    with pytest.raises(UserError, match="are training samples too"):
        Auto().fit(*train, validation=train)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n1,2\n2,3\n", "has no weight for class 3"),
        ("class,weight\n0,1\n1,2\n2,x\n3,1\n", "line 4: expected class,weight, found 2,x"),
        ("0,1\n1,2\n2,3\n3,4\n4,1\n", "line 5: there is no class 4"),
        ("0,1\n0,2\n", "line 2: class 0 has a weight already"),
        ("0,1\n1,-2\n2,3\n3,1\n", "line 2: class 1 has weight -2; weights are finite, at least 0"),
        ("0,1\n1,2\n2,inf\n3,1\n", "line 3: class 2 has weight inf; weights"),
        ("0,1\n1,2\n2,nan\n3,1\n", "line 3: class 2 has weight nan; weights"),
    ],
)
def test_a_file_of_weights_that_cannot_be_is_named(tmp_path: Path, text, message):
    path = tmp_path / "prior.csv"
    path.write_text(text)
    rng = np.random.default_rng(0)
    held = samples(rng, COUNTS // 4, bias=0.0)
    with pytest.raises(UserError, match=message):
        Auto(target_prior=str(path)).fit(*samples(rng, COUNTS, bias=0.0), validation=held)


def test_a_file_of_weights_is_read(tmp_path: Path):
    path = tmp_path / "prior.csv"
    path.write_text("class,weight\n1,2\n0,1\n\n2,0\n3,1\n")
    rng = np.random.default_rng(0)
    train, held = samples(rng, COUNTS, bias=0.0), samples(rng, COUNTS // 4, bias=0.0)
    by_file = Auto(target_prior=str(path)).fit(*train, validation=held)
    by_weights = Auto(target_prior=[1, 2, 0, 1]).fit(*train, validation=held)
    np.testing.assert_array_equal(by_file.transform(held[0]), by_weights.transform(held[0]))
    assert 2 not in by_file.predict(held[0])
