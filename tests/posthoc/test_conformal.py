"""Prediction sets: thresholds by hand, coverage of long-tailed classes in simulation, scores of unseen samples."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from longtail import HALO, Probe
from longtail.data.imbalance import long_tail_counts
from longtail.errors import UserError
from longtail.posthoc import MARC, LogitAdjustment, Tempered
from longtail.posthoc.deployment import SetScores
from longtail.posthoc.held_out import out_of_fold_logits, stratified_folds
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
def test_the_scores_of_sets_are_out_of_fold_and_at_equal_classes(method):
    rng = np.random.default_rng(3)
    (train, y), (held, labels) = draw(COUNTS, rng), draw(np.maximum(COUNTS // 4, 2), rng)
    method.fit(train, y, validation=(held, labels))
    logits = out_of_fold_logits(
        method, from_arrays(train, y), from_arrays(held, labels), stratified_folds(labels, 5, seed=0)
    )
    assert method.set_scores_ == SetScores.of(logits.double().softmax(1).numpy(), labels, calibrated=True)
    assert method.prior_check_.samples == len(labels)
    if isinstance(method, HALO):  # the target prior changes predictions, not sets
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


def test_calibrated_probabilities_stand_for_four_samples_of_every_class():
    rng = np.random.default_rng(6)
    labels = np.repeat([0, 1, 2], [60, 20, 2])
    probabilities = softmax(2 * rng.normal(size=(82, 4)), axis=1)  # the last class has no sample
    found = SetScores.of(probabilities, labels, calibrated=True)
    counts, scores, weights = np.array([60, 20, 2, 0]), [], []
    for i, row in enumerate(probabilities):
        scores.append(1 - row[labels[i]])
        weights.append(1 / (counts[labels[i]] + 4))
        for k in range(3):
            share = [one[k] / (one @ counts) for one in probabilities]
            scores.append(1 - row[k])
            weights.append(4 / (counts[k] + 4) * share[i] / sum(share))
    scores, weights = np.array(scores), np.array(weights)
    for coverage in (0.5, 0.9):
        for label in range(3):
            wanted = coverage * (1 + 1 / (counts[label] + 4) / 3)
            shares = [weights[scores <= own].sum() / weights.sum() for own in np.sort(scores)]
            by_hand = np.sort(scores)[np.searchsorted(shares, np.ceil(1000 * wanted - 1e-9) / 1000 - 1e-9)]
            assert found.thresholds(coverage)[label] == pytest.approx(by_hand)


def test_the_coverage_of_one_network_is_nearer_to_the_promise_than_its_rarest_classes_alone_allow():
    """Two samples of the rarest classes: the mean over draws is right, one draw need not be."""
    rng = np.random.default_rng(7)
    test, labels = draw(np.full(10, 100), rng)
    log_prior = np.log(COUNTS / COUNTS.sum())
    off = {True: [], False: []}
    for _ in range(40):
        held, y = draw(np.maximum(COUNTS // 10, 2), rng)
        for calibrated, missed in off.items():
            scores = SetScores.of(softmax(held - log_prior, axis=1), y, calibrated=calibrated)
            sets = scores.sets(softmax(test - log_prior, axis=1), 0.9)
            missed.append(np.mean([sets[labels == label, label].mean() for label in range(10)]) - 0.9)
    assert abs(np.mean(off[True])) < 0.02
    assert np.std(off[True]) < 0.75 * np.std(off[False])
    # What is printed of the uncertainty is not less than what is met: nothing is gained by expected samples.
    own = [SetScores.of(softmax(held - log_prior, axis=1), y, calibrated=calibrated) for calibrated in off]
    assert len({scores.effective_number for scores in own}) == 1
    assert np.std(off[True]) < np.sqrt(0.09 / own[0].effective_number)


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
