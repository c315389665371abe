"""The power of the training prior, from unlabelled samples: against brute force, simulation and real networks."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.datasets import load_digits

from longtail import HALO, Outputs, Probe
from longtail.data.imbalance import long_tail_counts, profile_indices
from longtail.errors import UserError
from longtail.posthoc import MARC
from longtail.posthoc.prior_estimate import PriorCheck, PriorEstimator, check_prior
from longtail.posthoc.prior_powers import Peak, PowerFamily

COUNTS = long_tail_counts(10, 1000, 100)
LOG_PRIOR = np.log(COUNTS / COUNTS.sum())
MEANS = 1.2 * np.random.default_rng(0).normal(size=(10, 4))
PERFECT = PriorCheck(1000, 0.0, 0.0, 0.0, 0.0)


def draw(power, number, rng, scale=1.0):
    """Labels at pi^power and posteriors at equal classes of Gaussian classes; `scale` makes them over-confident."""
    labels = rng.choice(10, size=number, p=softmax(power * LOG_PRIOR))
    inputs = MEANS[labels] + rng.normal(size=(number, 4))
    return labels, softmax(-0.5 * scale * np.square(inputs[:, None] - MEANS).sum(2), axis=1)


@pytest.mark.parametrize("target", [np.zeros(10), LOG_PRIOR, -0.5 * LOG_PRIOR])
def test_the_power_is_that_of_the_formula_whatever_the_prior_of_the_posteriors(target):
    _, balanced = draw(0.6, 300, np.random.default_rng(1))
    posteriors = softmax(np.log(balanced) + target, axis=1)

    def loss(power):
        powered = power * LOG_PRIOR - logsumexp(power * LOG_PRIOR)
        own = target - logsumexp(target)
        return power**2 / 2 - sum(np.log((row * np.exp(powered - own)).sum()) for row in posteriors)

    best = minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-7})
    estimate = PriorEstimator(LOG_PRIOR, target, PERFECT).estimate(posteriors)
    assert estimate.power == pytest.approx(best.x, abs=1e-4)
    for end in (estimate.low, estimate.high):
        assert loss(end) - best.fun == pytest.approx(1.92, abs=1e-2)
    np.testing.assert_allclose(estimate.prior, softmax(estimate.power * LOG_PRIOR))
    assert estimate.fits


@pytest.mark.parametrize("power", [-0.5, 1.0])
def test_the_interval_covers_the_true_power_also_for_a_classifier_with_a_bias(power):
    """Over- and under-confident posteriors, 300 unseen samples as in training."""
    rng = np.random.default_rng(2)
    right = PriorEstimator(LOG_PRIOR, np.zeros(10), PERFECT)
    covered: dict[str, list[bool]] = {"right": [], "corrected": [], "biased": []}
    for _ in range(60):
        scale = rng.choice([0.6, 1.7])
        labels, held_out = draw(1.0, 300, rng, scale)
        check = check_prior(held_out, labels, np.zeros(10), LOG_PRIOR)
        samples = draw(power, 400, rng, scale)[1]
        for name, estimate in (
            ("right", right.estimate(draw(power, 400, rng)[1])),
            ("corrected", PriorEstimator(LOG_PRIOR, np.zeros(10), check).estimate(samples)),
            ("biased", right.estimate(samples)),
        ):
            covered[name].append(estimate.low <= power <= estimate.high)
    assert 0.88 <= np.mean(covered["right"]) < 1
    assert np.mean(covered["corrected"]) >= 0.88
    assert np.mean(covered["biased"]) < 0.8


def test_the_errors_of_the_check_are_those_of_repeated_draws():
    rng = np.random.default_rng(3)
    checks = []
    for _ in range(80):
        labels, posteriors = draw(1.0, 300, rng, 1.3)
        checks.append(check_prior(posteriors, labels, np.zeros(10), LOG_PRIOR))
    for name in ("natural", "balanced"):
        biases, errors = ([getattr(check, f"{name}_{kind}") for check in checks] for kind in ("bias", "error"))
        assert np.std(biases) == pytest.approx(np.mean(errors), rel=0.35)


def test_a_large_bias_is_refused_and_a_small_one_corrected():
    peak = Peak(0.5, 0.4, 0.6, 400.0)
    small = PriorCheck(10**6, -0.2, 0.0, -0.1, 0.0)
    power, low, high = small.corrected(peak)
    assert small.refusal is None
    assert power == pytest.approx((0.5 + 0.1) / 0.9)
    assert (low, high) == (pytest.approx(power - 0.1 / 0.9), pytest.approx(power + 0.1 / 0.9))
    unsure = PriorCheck(30, -0.2, 0.3, -0.1, 0.3)
    assert unsure.corrected(peak)[2] - unsure.corrected(peak)[1] > 2 * (high - low)
    large = PriorCheck(960, -0.96, 0.05, -0.41, 0.05)
    with pytest.raises(UserError, match=r"estimated power is 0\.04 where it is 1, and -0\.41 where it is 0"):
        PriorEstimator(LOG_PRIOR, np.zeros(10), large).estimate(draw(1, 50, np.random.default_rng(0))[1])


def test_samples_that_are_like_no_power_are_recognised():
    rng = np.random.default_rng(4)
    estimator = PriorEstimator(LOG_PRIOR, np.zeros(10), PERFECT)
    false_alarms = sum(not estimator.estimate(draw(power, 300, rng)[1]).fits for power in (-1, 0, 1) for _ in range(10))
    assert false_alarms <= 2
    labels, posteriors = draw(0.0, 3000, rng)
    strange = estimator.estimate(posteriors[labels % 2 == 0])  # every second class never occurs
    assert not strange.fits
    assert (strange.surplus[::2] > 0).mean() > 0.7
    assert strange.surplus.sum() == pytest.approx(0, abs=1e-9)


def test_the_misfit_is_that_of_held_out_samples_too_if_the_classifier_is_wrong():
    """A classifier that sees one class as another: frequencies that are a power do not look like one."""
    rng = np.random.default_rng(7)

    def wrong(power, number):
        labels, posteriors = draw(power, number, rng)
        moved = posteriors * np.where(np.arange(10) % 3 == 0, 3.0, 1.0)
        return labels, moved / moved.sum(1, keepdims=True)

    labels, held_out = wrong(1.0, 1500)
    check = check_prior(held_out, labels, np.zeros(10), LOG_PRIOR)
    assert check.refusal is None
    naive = PriorCheck(*(getattr(check, name) for name in PriorCheck.__dataclass_fields__ if "misfit" not in name))
    found = [wrong(power, 2000)[1] for power in (-0.5, 0.0, 0.5) for _ in range(5)]
    assert all(PriorEstimator(LOG_PRIOR, np.zeros(10), check).estimate(one).fits for one in found)
    assert not all(PriorEstimator(LOG_PRIOR, np.zeros(10), naive).estimate(one).fits for one in found)
    labels, posteriors = wrong(0.0, 3000)
    assert not PriorEstimator(LOG_PRIOR, np.zeros(10), check).estimate(posteriors[labels % 2 == 0]).fits


def test_the_misfit_and_its_error_are_those_of_repeated_draws():
    rng = np.random.default_rng(8)
    family = PowerFamily.of(LOG_PRIOR, np.zeros(10))
    found = []
    for _ in range(200):
        labels, posteriors = draw(1.0, 300, rng)
        weights = np.exp(family.at(0.0) - family.at(1.0))[labels]
        found.append(family.misfit(posteriors, 0.0, weights))
    assert np.mean([one.distance for one in found]) == pytest.approx(0, abs=0.01)
    assert np.std([one.distance for one in found]) == pytest.approx(np.mean([one.error for one in found]), rel=0.4)
    posteriors = draw(0.5, 5000, rng)[1]
    family = PowerFamily.of(LOG_PRIOR, np.zeros(10))
    moved, shares = family.moved(posteriors, 0.5), np.exp(family.at(0.5))
    by_hand = (np.square(moved.mean(0) - shares) / shares).sum() - (moved.var(0) / shares).sum() / 5000
    assert family.misfit(posteriors, 0.5).distance == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (np.full((29, 10), 0.1), "30 samples at least, not from 29"),
        (np.eye(10)[np.zeros(100, int)], "all 100 samples are predicted as one class"),
        (np.eye(10)[[0] * 9999 + [1]], r"further from balance than any power .* \(beyond \+4\)"),
    ],
)
def test_samples_that_tell_nothing_are_refused(probabilities, message):
    with pytest.raises(UserError, match=message):
        PriorEstimator(LOG_PRIOR, np.zeros(10), PERFECT).estimate(probabilities)


def test_classifiers_that_tell_nothing_are_refused():
    some = draw(0.0, 50, np.random.default_rng(0))[1]
    never = np.where(np.arange(10) == 3, -np.inf, 0.0)
    for estimator, message in (
        (PriorEstimator(LOG_PRIOR, np.zeros(10), None), "only after a trial on held-out samples"),
        (PriorEstimator(LOG_PRIOR, never, PERFECT), "target prior with 0 for a class"),
        (PriorEstimator(np.full(10, -np.log(10)), np.zeros(10), PERFECT), "about equally frequent in training"),
    ):
        with pytest.raises(UserError, match=message):
            estimator.estimate(some)
    assert check_prior(some[:29], np.arange(29) % 10, np.zeros(10), LOG_PRIOR) is None


def test_a_window_of_a_stream_is_the_estimate_from_its_last_samples():
    rng = np.random.default_rng(5)
    estimator = PriorEstimator(LOG_PRIOR, np.zeros(10), PERFECT)
    window = estimator.window(size=200)
    stream = np.concatenate([draw(1.0, 300, rng)[1], draw(-0.5, 300, rng)[1]])
    with pytest.raises(UserError, match="30 samples at least, not from 0"):
        window.estimate()
    for start in range(0, 600, 7):
        window.update(stream[start : start + 7])
    assert len(window) == 200
    assert window.estimate().power == pytest.approx(estimator.estimate(stream[-200:]).power, abs=1e-5)
    before = window.estimate()
    for wrong, message in (
        (np.full((3, 9), 1 / 9), "probabilities of 10 classes"),
        (100 * stream[:40], "no probabilities: every row must sum to 1"),
        (np.log(stream[:40]), "no probabilities"),
        (np.zeros((40, 10)), "no probabilities"),
        (np.full((1, 10), np.nan), "no probabilities"),
    ):
        with pytest.raises(UserError, match=message):
            window.update(wrong)
    with pytest.raises(UserError, match="no probabilities"):
        estimator.estimate(np.log(stream))
    assert window.estimate().power == before.power


def test_halo_finds_the_frequencies_of_real_images(cifar_features):
    """A ResNet-32 for CIFAR-10-LT 100; half of the test images, cut as in training, are held out."""
    data, y = cifar_features, cifar_features["test_y"]
    rng = np.random.default_rng(0)
    half = rng.permutation(len(y))
    own, rest = half[:5000], np.sort(half[5000:])
    held = own[profile_indices(y[own], 50, "forward")]
    train = Outputs(
        data["y"], np.bincount(data["y"]), logits=data["views"][0], features=data["view_features"][0], split="train"
    )
    halo = HALO().fit(train, validation=(data["test"][held], y[held], data["test_features"][held]))
    for order, factor in (("forward", 50), ("forward", 5), ("backward", 10)):
        rows = rest[profile_indices(y[rest], factor, order)]
        logits, features = data["test"][rows], data["test_features"][rows]
        estimate = halo.estimate_prior(logits, features)
        known = np.log(factor) / np.log(100) * (1 if order == "forward" else -1)
        assert estimate.low - 0.05 <= known <= estimate.high + 0.05, (order, factor)
        assert estimate.high - estimate.low < 0.6
        uniform, adapted = (
            (np.asarray(method.predict(logits, features)) == y[rows]).mean()
            for method in (halo, halo.with_target_prior(estimate.power))
        )
        assert adapted > uniform
    tensors = [torch.from_numpy(array) for array in (logits, features)]
    assert halo.estimate_prior(*tensors).power == pytest.approx(estimate.power, abs=1e-4)
    with pytest.raises(UserError, match="X has 9 features, but HALO is expecting 10"):
        halo.estimate_prior(logits[:, :9], features)
    with pytest.raises(UserError, match="MARC has no target prior to estimate"):
        MARC().fit(train).estimate_prior(logits)


def test_probe_finds_the_frequencies_of_unlabelled_features():
    features, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    features, labels = features[order], labels[order]
    train, rest = np.arange(900), np.arange(900, len(labels))
    train = train[profile_indices(labels[train], 20)]
    probe = Probe().fit(features[train], labels[train])
    span = np.log(np.bincount(labels[train]).max() / np.bincount(labels[train]).min())
    for direction, factor in (("forward", 10), ("backward", 10)):
        rows = rest[profile_indices(labels[rest], factor, direction)]
        estimate = probe.estimate_prior(features[rows])
        known = np.log(factor) / span * (1 if direction == "forward" else -1)
        assert estimate.low - 0.1 <= known <= estimate.high + 0.1
        assert probe.with_target_prior(estimate.power).score(features[rows], labels[rows]) > 0.8
    with pytest.raises(UserError, match="features"):
        probe.estimate_prior(features[:50, :9])


def test_posteriors_move_to_another_prior_by_bayes_rule():
    family = PowerFamily.of(LOG_PRIOR, LOG_PRIOR)
    logits = np.random.default_rng(6).normal(size=(5, 10))
    np.testing.assert_allclose(
        np.log(family.moved(softmax(logits, axis=1), 0.25)), log_softmax(logits - 0.75 * LOG_PRIOR, axis=1)
    )
