"""Prediction sets: thresholds by hand, coverage of long-tailed classes in simulation, scores of unseen samples."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from longtail import HALO, Probe
from longtail.data.imbalance import long_tail_counts
from longtail.errors import UserError
from longtail.posthoc import MARC, LogitAdjustment, Tempered
from longtail.posthoc.conformal import SetScores
from longtail.posthoc.deployment import unseen_logits
from longtail.posthoc.inputs import from_arrays

COUNTS = long_tail_counts(10, 400, 50)
MEANS = np.random.default_rng(0).normal(size=(10, 4))


def draw(counts, rng):
    """Labels and logits of Gaussian classes, as a network at the training prior would give them."""
    labels = np.repeat(np.arange(len(counts)), counts)
    inputs = MEANS[labels] + rng.normal(size=(len(labels), 4))
    return -0.5 * np.square(inputs[:, None] - MEANS).sum(2) + np.log(COUNTS / COUNTS.sum()), labels


def test_the_threshold_is_the_weighted_quantile_with_the_new_sample_counted():
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1, 2], [60, 20, 4])
    probabilities = softmax(rng.normal(size=(84, 3)), axis=1)
    scores = SetScores.of(probabilities, labels)
    own = 1 - probabilities[np.arange(84), labels]
    mass = np.array([1 / 60, 1 / 20, 1 / 4])[labels]
    for coverage in (0.5, 0.8, 0.9):
        for label, new in enumerate((1 / 60, 1 / 20, 1 / 4)):
            # The smallest score whose share of all weights, that of the new sample included, is the coverage.
            reached = [score for score in np.sort(own) if mass[own <= score].sum() / (mass.sum() + new) >= coverage]
            found = scores.thresholds(coverage)[label]
            assert min(reached) <= found
            assert np.searchsorted(np.sort(own), found) - np.searchsorted(np.sort(own), min(reached)) <= 1
    sets = scores.sets(probabilities, 0.8)
    assert sets.any(1).all()
    naive = (1 - probabilities <= scores.thresholds(0.8)) | (probabilities == probabilities.max(1, keepdims=True))
    np.testing.assert_array_equal(sets, naive)


def test_the_mean_coverage_of_classes_is_as_promised_however_rare_they_are():
    rng = np.random.default_rng(2)
    coverage = {0.8: [], 0.95: []}
    for _ in range(20):
        train, y = draw(COUNTS, rng)
        held = draw(np.maximum(COUNTS // 4, 2), rng)
        logits, labels = draw(np.full(10, 100), rng)
        method = LogitAdjustment().fit(train, y, validation=held)
        for promised, reached in coverage.items():
            sets = method.predict_set(logits, coverage=promised)
            reached.append(np.mean([sets[labels == label, label].mean() for label in range(10)]))
    for promised, reached in coverage.items():
        assert promised - 0.02 <= np.mean(reached) <= promised + 0.04
    promise = method.set_scores_.promise(0.9)
    counts = np.array(method.set_scores_.counts)
    number = np.square((1 / counts[held[1]]).sum()) / np.square(1 / counts[held[1]]).sum()
    assert f"worth {number:.0f} of equal classes" in promise
    assert promise.endswith("promised for each class: 4 of 10 classes had fewer than 10 unseen samples")


@pytest.mark.parametrize("method", [HALO(), Tempered(HALO())], ids=["HALO", "Tempered"])
def test_a_method_that_uses_held_out_samples_is_tried_by_fits_that_have_not_seen_them(method):
    rng = np.random.default_rng(3)
    (train, y), (held, labels) = draw(COUNTS, rng), draw(np.maximum(COUNTS // 4, 2), rng)
    method.fit(train, y, validation=(held, labels))
    seen = []
    refitted = type(method).refitted

    class Spy(type(method)):
        def refitted(self, data, validation):
            seen.append(validation.rows.read(slice(None)).numpy())
            return refitted(self, data, validation)

    spy = Spy(**method.get_params(deep=False))
    vars(spy).update(vars(method))
    logits = unseen_logits(spy, from_arrays(train, y), from_arrays(held, labels))
    assert logits.shape == held.shape
    assert np.isfinite(logits).all()
    left_out = [(~(held[:, None].astype(np.float32) == kept[None]).all(2).any(1)) for kept in seen]
    assert len(left_out) == 5
    np.testing.assert_array_equal(np.sum(left_out, axis=0), 1)  # every sample is left out once
    assert method.set_scores_ is not None
    assert method.prior_check_.samples == len(labels)
    # The target prior changes predictions, not sets.
    if isinstance(method, HALO):
        moved = method.with_target_prior("train")
        np.testing.assert_array_equal(moved.predict_set(held), method.predict_set(held))
        given = torch.from_numpy(held)
        assert torch.equal(method.predict_set(given), torch.from_numpy(method.predict_set(held)))


def test_probe_gives_sets_and_leaves_out_classes_without_samples():
    rng = np.random.default_rng(4)
    labels = np.repeat(np.arange(10), COUNTS)
    probe = Probe(classes=range(11)).fit(MEANS[labels] + rng.normal(size=(len(labels), 4)), labels)
    truth = np.repeat(np.arange(10), 100)
    sets = probe.predict_set(MEANS[truth] + rng.normal(size=(1000, 4)), coverage=0.9)
    assert not sets[:, 10].any()
    assert 0.86 <= sets[np.arange(1000), truth].mean() <= 0.95


def test_what_cannot_be_promised_is_refused():
    rng = np.random.default_rng(5)
    (train, y), (held, labels) = draw(COUNTS, rng), draw(np.maximum(COUNTS // 4, 2), rng)
    method = MARC().fit(train, y, validation=(held, labels))
    for coverage in (0, 1, -0.1, 1.5, np.nan, True):
        with pytest.raises(UserError, match="coverage must be a number, above 0 and below 1"):
            method.predict_set(held, coverage=coverage)
    with pytest.raises(UserError, match=r"a coverage of 0\.9999 needs more unseen samples than the"):
        method.predict_set(held, coverage=0.9999)
    with pytest.raises(UserError, match="MARC is expecting 10"):
        method.predict_set(held[:, :9])
    few = rng.permutation(len(labels))[:29]
    for validation in (None, (held[few], labels[few]), (train, y)):  # none, too few, and samples that were seen
        with pytest.raises(UserError, match="prediction sets need 30 unseen samples at least"):
            MARC().fit(train, y, validation=validation).predict_set(held)
