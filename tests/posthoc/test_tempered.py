"""A temperature after a calibration."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail import HALO, MARC
from longtail.errors import UserError
from longtail.metrics.scores import evaluate
from longtail.posthoc import LogitAdjustment, TemperatureScaling, Tempered
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.priors import NEVER, TEMPERATURES, best_scale, sample_weights

from .conftest import LABELS, LOGITS


def overconfident(rng, counts, bias):
    y = np.repeat(np.arange(len(counts)), counts)
    return 4 * (np.eye(len(counts))[y] + 0.7 * rng.normal(size=(len(y), len(counts)))) + bias, y


COUNTS = np.array([600, 200, 60, 20])
BIAS = 2 * np.log(COUNTS / COUNTS.sum())


def test_decisions_stay_and_confidence_becomes_honest():
    rng = np.random.default_rng(0)
    train, held, (test, y) = (overconfident(rng, c, BIAS) for c in (COUNTS, COUNTS // 2, np.full(4, 1000)))
    alone = LogitAdjustment(tau=2).fit(*train)
    tempered = Tempered(LogitAdjustment(tau=2)).fit(*train, validation=held)
    before, after = alone.transform(test), tempered.transform(test)
    np.testing.assert_array_equal(before.argmax(1), after.argmax(1))
    np.testing.assert_allclose(after, before / tempered.temperature_, atol=1e-5)
    scores = [evaluate(logits, y, COUNTS) for logits in (before, after)]
    assert scores[1].ece < 0.5 * scores[0].ece
    assert scores[1].nll < scores[0].nll
    # The likelihood at the prior pi^(1/2), searched on a grid.
    logits, labels = alone.transform(held[0]), held[1]
    half = 0.5 * np.log(COUNTS / COUNTS.sum())

    def loss(temperature):
        shares = torch.from_numpy(logits / temperature + half).log_softmax(1).numpy()
        return -(COUNTS[labels] ** -0.5 * shares[np.arange(len(labels)), labels]).sum()

    grid = np.geomspace(0.5, 10, 400)
    assert tempered.temperature_ == pytest.approx(grid[np.argmin([loss(t) for t in grid])], rel=0.02)


def test_a_target_prior_is_not_scaled():
    rng = np.random.default_rng(0)
    train, held = overconfident(rng, COUNTS, BIAS), overconfident(rng, COUNTS // 2, BIAS)
    weights = np.array([5.0, 1.0, 0.0, 2.0])
    plain = Tempered(HALO()).fit(*train, validation=held)
    moved = Tempered(HALO(target_prior=weights)).fit(*train, validation=held)
    assert moved.temperature_ == pytest.approx(plain.temperature_, rel=0.1)
    own, uniform = moved.temperature_ * (moved.transform(held[0]) - np.log(np.maximum(weights, 1e-9) / 8)), HALO()
    difference = (own - uniform.fit(*train, validation=held).transform(held[0]))[:, [0, 1, 3]]
    np.testing.assert_allclose(difference - difference[:, :1], 0, atol=1e-4)
    assert 2 not in moved.predict(held[0])


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
def test_it_folds():
    rng = np.random.default_rng(0)
    weight, bias = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    features = rng.normal(size=(880, 7)).astype(np.float32)
    y = np.repeat(np.arange(4), COUNTS)
    logits = features @ weight.numpy().T
    marc = Tempered(MARC()).fit(logits[::2], y[::2], validation=(logits[1::2], y[1::2]))
    folded, offset = marc.fold(weight, bias)
    np.testing.assert_allclose(features @ folded.numpy().T + offset.numpy(), marc.transform(logits), atol=1e-4)


def test_what_cannot_be_tempered_is_refused():
    rng = np.random.default_rng(0)
    train = overconfident(rng, COUNTS, BIAS)
    with pytest.raises(UserError, match="there are none: hold out a part"):
        Tempered(MARC()).fit(*train)
    with pytest.raises(UserError, match="follows a method that changes decisions"):
        Tempered(TemperatureScaling()).fit(*train)
    with pytest.raises(UserError, match="880 of 880 held-out samples are training samples too"):
        Tempered(MARC()).fit(*train, validation=train)
    logits, y = overconfident(rng, COUNTS, BIAS)
    one, two = y == 0, y < 2
    with pytest.raises(UserError, match="the held-out samples are of 1 class; a temperature needs two at least"):
        Tempered(MARC()).fit(*train, validation=(logits[one], y[one]))
    with pytest.raises(UserError, match="of 1 class that the target prior expects; a temperature needs two"):
        Tempered(HALO(target_prior=[1, 0, 1, 1])).fit(*train, validation=(logits[two], y[two]))


def test_held_out_samples_of_some_classes_are_enough_for_a_temperature():
    """The softmax is over the classes that have held-out samples; a class with one counts."""
    rng = np.random.default_rng(4)
    train = from_arrays(LOGITS, LABELS)
    labels = np.array([0] * 8 + [1] * 5 + [2])
    logits = 3 * (rng.normal(size=(14, 4)) + np.eye(4)[labels])
    held_out = from_arrays(logits, labels, classes=train.classes, need_every_class=False)
    fitted = Tempered(LogitAdjustment()).fit_checked(train, held_out)
    prior = np.bincount(LABELS) / 19
    adjusted = torch.from_numpy(logits - np.log(prior))[:, :3]
    weights = torch.from_numpy(sample_weights(labels, np.bincount(LABELS)))
    half = torch.from_numpy(0.5 * np.log(prior[:3]))

    def loss(scale):
        return float(weights @ F.cross_entropy(scale * adjusted + half, torch.from_numpy(labels), reduction="none"))

    scale = 1 / fitted.temperature_
    assert loss(scale) <= min(loss(0.97 * scale), loss(1.03 * scale))


def test_what_a_target_prior_adds_is_zero_for_a_class_that_never_occurs():
    rng = np.random.default_rng(0)
    train, held = overconfident(rng, COUNTS, BIAS), overconfident(rng, COUNTS // 2, BIAS)
    fitted = Tempered(HALO(target_prior=[5.0, 1.0, 0.0, 2.0])).fit(*train, validation=held)
    expected = [np.log(5 / 8), np.log(1 / 8), 0.0, np.log(2 / 8)]
    np.testing.assert_allclose(fitted._target(torch.zeros(4)), expected, rtol=1e-6)
    assert fitted.temperature_ != 1
    assert (fitted.transform(held[0])[:, 2] == NEVER).all()  # whatever the temperature, finite in float16
    weight, bias = fitted.fold(torch.randn(4, 3), torch.zeros(4))
    assert weight[2].tolist() == [0, 0, 0]
    assert bias[2] == NEVER
    plain = Tempered(LogitAdjustment()).fit(*train, validation=held)
    assert plain._target(torch.zeros(4)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1e3, 1e6])
def test_logits_of_any_size_have_a_temperature(size):
    """Scores of another size have a temperature larger by as much, and the same confidence."""
    rng = np.random.default_rng(0)
    logits, y = overconfident(rng, COUNTS, BIAS)
    scores, codes = torch.from_numpy(logits), torch.from_numpy(y)
    weights, none = np.ones(len(y)), torch.zeros(4, dtype=torch.float64)
    usual = best_scale(scores, codes, none, weights)
    assert best_scale(size * scores, codes, none, weights) * size == pytest.approx(usual, rel=3e-3)
    # Samples that are all right would have no best temperature: it stays within bounds that go by their size.
    sure = size * torch.eye(4, dtype=torch.float64)[codes]
    assert best_scale(sure, codes, none, weights) * size <= 1 / (TEMPERATURES[0] * 0.1)
