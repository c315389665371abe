"""Models whose own logits are right for equal classes: HALO finds out, or is told, and treats them as usual ones."""

import numpy as np
import pytest
import torch

from longtail import HALO, MARC, Outputs
from longtail.errors import UserError
from longtail.methods import TRAIN_METHODS, build_posthoc
from longtail.posthoc import LogitAdjustment
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.priors import detect_model_prior

COUNTS = np.array([400, 120, 40, 12])
LOG_PRIOR = np.log(COUNTS / COUNTS.sum())


def drawn(sizes, seed, *, offset=LOG_PRIOR, scale=1.0, unknown=1.0):
    """Logits that are log p(x | y) plus an offset, of samples of each class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(4), sizes)
    features = 2.2 * np.eye(4)[labels] + unknown * rng.normal(size=(len(labels), 4))
    return scale * (2.2 * features + offset), labels


@pytest.mark.parametrize(("offset", "expected"), [(LOG_PRIOR, "train"), (0 * LOG_PRIOR, "uniform")])
@pytest.mark.parametrize("scale", [0.4, 1.0, 1.2])
@pytest.mark.parametrize("sizes", [COUNTS, np.full(4, 100), COUNTS[::-1]])
def test_training_outputs_tell_what_a_model_is_right_for(offset, expected, scale, sizes):
    """At any usual temperature, whatever the distribution of the samples at hand."""
    logits, labels = drawn(sizes, 0, offset=offset, scale=scale)
    assert detect_model_prior(from_arrays(logits, labels, class_counts=COUNTS)) == expected


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_logits_in_another_unit_tell_nothing(scale):
    logits, labels = drawn(COUNTS, 0, offset=0, scale=scale)
    assert detect_model_prior(from_arrays(logits, labels, class_counts=COUNTS)) == "train"


def test_training_images_that_are_all_known_tell_nothing():
    logits, labels = drawn(COUNTS, 0, offset=0, unknown=0.05)
    assert detect_model_prior(from_arrays(logits, labels, class_counts=COUNTS)) == "train"


def test_equal_classes_leave_nothing_to_find():
    logits, labels = drawn(np.full(4, 50), 0, offset=0)
    assert detect_model_prior(from_arrays(logits, labels)) == "train"


def whole(offset, split, seed, sizes=COUNTS):
    """Outputs with features and a head."""
    logits, labels = drawn(sizes, seed, offset=LOG_PRIOR)
    features = ((logits - LOG_PRIOR) / 2.2).astype(np.float32)
    head = {"head_weight": 2.2 * np.eye(4, dtype=np.float32), "head_bias": np.asarray(offset, dtype=np.float32)}
    return Outputs(
        labels, COUNTS, logits=features @ head["head_weight"].T + offset, features=features, split=split, **head
    )


@pytest.mark.parametrize("held_out", ["validation", "cross-fit"])
def test_a_model_for_equal_classes_is_treated_as_the_same_model_with_the_training_prior(held_out):
    """Both give the same logits, fold into the same layer, and move alike with the target prior."""
    fitted, given = [], []
    for offset in (LOG_PRIOR, 0 * LOG_PRIOR):
        train, held, test = (whole(offset, split, seed) for seed, split in enumerate(("train", "validation", "test")))
        halo = HALO(held_out=held_out).fit(train, validation=held if held_out == "validation" else None)
        fitted.append(halo)
        given.append(test)
    usual, equal = fitted
    assert (usual.model_prior_, equal.model_prior_) == ("train", "uniform")
    assert list(usual.numbers_.values()) == pytest.approx(list(equal.numbers_.values()), abs=1e-3)
    for prior in ("uniform", "train", [1.0, 0.0, 2.0, 1.0]):
        one, other = (halo.with_target_prior(prior).transform(test) for halo, test in zip(fitted, given, strict=True))
        np.testing.assert_allclose(one, other, atol=0.02)
    weight, bias = equal.fold(torch.from_numpy(given[1].head_weight), torch.from_numpy(given[1].head_bias))
    folded = given[1].features @ weight.numpy().T + bias.numpy()
    np.testing.assert_allclose(folded, equal.transform(given[1]), atol=1e-4)


def test_what_is_said_is_not_searched_for():
    logits, labels = drawn(COUNTS, 0, offset=0)
    held = drawn(COUNTS // 4, 1, offset=0)
    assert HALO(model_prior="train").fit(logits, labels, validation=held).model_prior_ == "train"
    usual, usual_labels = drawn(COUNTS, 0)
    told = HALO(model_prior="uniform").fit(usual, usual_labels, validation=drawn(COUNTS // 4, 1))
    assert told.model_prior_ == "uniform"
    with pytest.raises(UserError, match="unknown model_prior 'balanced'; choose from: auto, train, uniform"):
        HALO(model_prior="balanced").fit(logits, labels, validation=held)


def balanced(logits, labels):
    return np.mean([(np.asarray(logits).argmax(1) == labels)[labels == c].mean() for c in np.unique(labels)])


def test_a_balanced_model_is_not_balanced_twice():
    """With few held-out images: about as good as the model itself, where the usual prior loses points."""
    (train, labels), held = drawn(COUNTS, 0, offset=0), drawn([14, 4, 1, 1], 1, offset=0)
    test, truth = drawn(np.full(4, 2000), 2, offset=0)
    own = balanced(test, truth)
    found = HALO().fit(train, labels, validation=held)
    assert balanced(found.transform(test), truth) > own - 0.01
    wrong = HALO(model_prior="train").fit(train, labels, validation=held)
    assert balanced(wrong.transform(test), truth) < own - 0.02


def test_a_run_says_how_it_was_trained():
    told = {name for name, method in TRAIN_METHODS.items() if method.balances}
    assert told == {"lade", "balanced-softmax", "logit-adjusted"}
    assert build_posthoc("halo", {}, trained_by="balanced-softmax").model_prior == "uniform"
    assert build_posthoc("halo", {}, trained_by="softmax").model_prior == "auto"
    assert build_posthoc("halo", {"model-prior": "auto"}, trained_by="lade").model_prior == "auto"
    assert isinstance(build_posthoc("marc", {}, trained_by="lade"), MARC)
    assert isinstance(build_posthoc("logit-adjustment", {}, trained_by="lade"), LogitAdjustment)
