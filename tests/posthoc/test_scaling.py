import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize, minimize_scalar
from sklearn.linear_model import LogisticRegression

from longtail import MARC
from longtail.metrics.confidence import expected_calibration_error, softmax
from longtail.posthoc import PlattScaling, TemperatureScaling, VectorScaling

RNG = np.random.default_rng(0)
Y = np.repeat(np.arange(3), [150, 70, 30])
LOGITS = 2.5 * (RNG.normal(size=(250, 3)) + np.eye(3)[Y])


def cross_entropy(logits):
    return F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(Y)).item()


def test_temperature_is_the_one_of_a_line_search():
    best = minimize_scalar(lambda t: cross_entropy(LOGITS / t), bounds=(0.05, 20), method="bounded")
    method = TemperatureScaling().fit(LOGITS, Y)
    assert method.temperature_ == pytest.approx(best.x, rel=1e-3)
    assert (method.predict(LOGITS) == LOGITS.argmax(1)).all()


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
def test_logits_worse_than_chance_become_flat_and_keep_their_order():
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    logits = -2 * np.eye(3)[y] + rng.normal(size=(90, 3))
    method = TemperatureScaling().fit(logits, y)
    assert method.temperature_ == 1000
    np.testing.assert_array_equal(method.predict(logits), logits.argmax(1))
    np.testing.assert_allclose(method.predict_proba(logits), 1 / 3, atol=0.01)


def test_temperature_of_calibrated_logits_is_one():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(60_000, 3)) * 1.5
    y = (rng.random((60_000, 1)) > softmax(logits).cumsum(1)).sum(1)
    method = TemperatureScaling().fit(logits, y)
    assert method.temperature_ == pytest.approx(1, abs=0.03)
    overconfident = TemperatureScaling().fit(3 * logits, y)
    assert overconfident.temperature_ == pytest.approx(3, abs=0.09)
    before = expected_calibration_error(softmax(3 * logits), y)
    assert expected_calibration_error(overconfident.predict_proba(3 * logits), y) < before / 5


def test_vector_scaling_is_the_minimum_and_marc_without_weights():
    scale = 1 / TemperatureScaling(tolerance=1e-8).fit(LOGITS, Y).temperature_

    def loss(x):
        return 250 * cross_entropy(LOGITS * x[:3] + x[3:]) + 0.5 * 2.5 * np.square(x - scale * (np.arange(6) < 3)).sum()

    best = minimize(loss, np.repeat([1.0, 0.0], 3), options={"gtol": 1e-6})
    method = VectorScaling(ridge=2.5, tolerance=1e-8).fit(LOGITS, Y)
    np.testing.assert_allclose(np.concatenate([method.scale_, method.shift_]), best.x, atol=1e-3)
    free, marc = VectorScaling(ridge=1e-6, tolerance=1e-8), MARC(gamma=0.0, ridge=1e-9, tolerance=1e-8)
    probabilities = [one.fit(LOGITS, Y).predict_proba(LOGITS) for one in (free, marc)]
    np.testing.assert_allclose(*probabilities, atol=1e-4)


def test_vector_scaling_of_few_samples_stays_near_temperature_scaling_in_any_unit():
    """Three samples per class and cosines without a scale: a scale and a shift of each class would be noise."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(100), 3)
    logits = 0.05 * (rng.normal(size=(300, 100)) + 3 * np.eye(100)[y])
    method, temperature = VectorScaling().fit(logits, y), TemperatureScaling().fit(logits, y)
    assert method.scale_ == pytest.approx(np.full(100, 1 / temperature.temperature_), rel=0.1)
    assert np.abs(method.shift_).max() < 1
    larger = VectorScaling().fit(400 * logits, y)  # in a larger unit, too
    assert larger.result_.converged
    assert larger.scale_ == pytest.approx(np.full(100, 1 / temperature.temperature_ / 400), rel=0.6)


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
def test_platt_scaling_is_a_logistic_regression_per_class():
    method = PlattScaling().fit(LOGITS, Y)
    for j in range(3):
        positives = (j == Y).sum()
        high, low = (positives + 1) / (positives + 2), 1 / (250 - positives + 2)
        # A sample with target t counts t as positive and 1 - t as negative.
        targets = np.where(j == Y, high, low)
        x = np.tile(LOGITS[:, j : j + 1], (2, 1))
        reference = LogisticRegression(C=1e8, max_iter=10_000, tol=1e-10)
        reference.fit(x, np.repeat([1, 0], 250), sample_weight=np.concatenate([targets, 1 - targets]))
        assert method.scale_[j] == pytest.approx(reference.coef_[0, 0], rel=1e-3)
        assert method.shift_[j] == pytest.approx(reference.intercept_[0], rel=1e-3, abs=1e-3)


def test_platt_stands_a_class_told_apart_perfectly():
    logits = np.array([[5.0, -5], [4, -4], [-5, 5], [-6, 6]])
    method = PlattScaling().fit(logits, [0, 0, 1, 1])
    assert method.result_.converged
    assert np.abs(method.scale_).max() < 10
