"""What "solved" promises, checked by a computation of its own in float64: all rows, every kind of data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from longtail import MARC
from longtail.posthoc import LWS, VectorScaling
from longtail.posthoc.marc import class_weights
from longtail.posthoc.solver import SMALLEST_GOAL, affine
from longtail.posthoc.solver.affine import SMALLEST_SCALE

KINDS = ["plain", "separable", "large", "duplicated", "constant", "calibrated"]


def data_of(kind, seed=0, classes=5, most=300, fewest=1):
    """Logits, labels and norms of classes with very different counts."""
    rng = np.random.default_rng(seed)
    counts = np.maximum((most * (fewest / most) ** (np.arange(classes) / (classes - 1))).astype(int), fewest)
    y = np.repeat(np.arange(classes), counts)
    logits = (
        rng.normal(size=(len(y), classes))
        + {"separable": 12, "large": 30, "duplicated": 4}.get(kind, 1) * np.eye(classes)[y]
    )
    if kind == "large":
        logits *= 10
    if kind == "duplicated":
        logits[:, 1] = logits[:, 0]
    if kind == "constant":
        logits[:, 2] = 0.7
    if kind == "calibrated":  # little to repair: the first gradient is small already
        logits = logits - np.log(class_weights(counts, 1.2)) / 3
    return logits.astype(np.float32), y, rng.uniform(0.3, 3, classes)


def plain_loss(x, logits, y, weights, norms, ridge):
    """Value and gradient of MARC's problem, written down once more."""
    omega, beta = np.split(x, 2)
    calibrated = logits * omega + beta * norms
    shares = np.exp(calibrated - calibrated.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    each = weights[y] / len(y)
    value = -(each * np.log(np.maximum(shares[np.arange(len(y)), y], 1e-300))).sum()
    pull, ridge = x - np.repeat([1.0, 0.0], len(norms)), ridge * each.sum()
    shares[np.arange(len(y)), y] -= 1
    shares *= each[:, None]
    gradient = np.concatenate([(shares * logits).sum(0), shares.sum(0) * norms]) + ridge * pull
    return value + 0.5 * ridge * pull @ pull, gradient


def projected(x, gradient):
    """The gradient without what would push a scale below its bound."""
    at_bound = np.arange(len(x)) < (len(x) // 2) * (x <= SMALLEST_SCALE)
    return np.where(at_bound, np.minimum(gradient, 0), gradient)


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 1000),
    st.integers(2, 9),
    st.sampled_from([(300, 1), (3000, 2), (40, 40)]),
    st.sampled_from([0.0, 1.2, 2.0]),
    st.booleans(),
    st.sampled_from([1e-3, 1e-5, 1e-7]),
)
def test_solved_means_that_the_gradient_on_all_rows_is_small_in_float64(
    kind, seed, classes, sizes, gamma, large, tolerance
):
    logits, y, norms = data_of(kind, seed, classes + (kind in ("constant", "duplicated")), *sizes)
    with pytest.MonkeyPatch.context() as patch:
        if large:  # in float32, by way of parts of the rows
            patch.setattr(affine, "SMALL_PROBLEM", 0)
        marc = MARC(gamma, tolerance=tolerance).fit(logits, y, weight_norms=norms)
    counts = np.bincount(y)
    if len(counts) == 2:  # solved on margins
        logits = logits - logits.mean(1, keepdims=True)
    rest = logits.astype(np.float64), y, class_weights(counts, gamma), norms, 5e-4 * 10 / len(counts)
    first, last = (
        np.abs(projected(x, plain_loss(x, *rest)[1])).max()
        for x in (np.repeat([1.0, 0.0], len(counts)), np.concatenate([marc.omega_, marc.beta_]))
    )
    assert marc.result_.converged
    rounding = SMALLEST_GOAL * max(1, np.abs(logits).max(), norms.max())
    assert last <= max(1.01 * tolerance * first, rounding)
    assert marc.result_.gradient <= tolerance or last <= rounding


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
@pytest.mark.parametrize("seed", [2, 11])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5])
def test_float32_does_not_hide_that_a_nearly_calibrated_model_is_not_solved(seed, tolerance, monkeypatch):
    """Where the first gradient is as small as the rounding of float32, the work is done in float64."""
    logits, y, norms = data_of("plain", seed, 6, 3000, 20)
    settings = {"gamma": 0.0, "ridge_centre": "identity", "ridge": 1e-6}
    logits = np.float32(MARC(**settings, tolerance=1e-6).fit(logits, y, weight_norms=norms).transform(logits))
    monkeypatch.setattr(affine, "SMALL_PROBLEM", 0)
    marc = MARC(**settings, tolerance=tolerance).fit(logits, y, weight_norms=norms)
    identity, ridge = np.repeat([1.0, 0.0], 6), 1e-6 * 10 / 6

    def largest(x):
        plain = plain_loss(x, logits.astype(np.float64), y, np.ones(6), norms, 0.0)[1]
        return np.abs(plain + ridge * (x - identity)).max()

    relative = largest(np.concatenate([marc.omega_, marc.beta_])) / largest(identity)
    assert marc.result_.converged
    assert relative <= tolerance
    assert marc.result_.gradient == pytest.approx(relative, rel=1e-3)
    assert marc.result_.iterations <= 15


@pytest.mark.parametrize("kind", ["plain", "separable", "duplicated", "constant"])
@pytest.mark.parametrize("sizes", [(300, 1), (5, 5)])
def test_it_is_the_minimum_that_plain_scipy_finds(kind, sizes):
    logits, y, norms = data_of(kind, 1, 4, *sizes)
    counts = np.bincount(y)
    rest = logits.astype(np.float64), y, class_weights(counts, 1.2), norms, 5e-4 * 10 / 4
    options = {"gtol": 1e-12, "ftol": 0.0, "maxiter": 5000, "maxfun": 20000}
    bounds = [(SMALLEST_SCALE, None)] * 4 + [(None, None)] * 4
    best = minimize(plain_loss, np.ones(8), rest, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    marc = MARC(tolerance=1e-9).fit(logits, y, weight_norms=norms)
    assert marc.result_.value == pytest.approx(best.fun, rel=1e-7)
    np.testing.assert_allclose(np.concatenate([marc.omega_, marc.beta_]), best.x, atol=1e-3)


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
@pytest.mark.parametrize("method", [LWS, VectorScaling])
def test_other_methods_of_the_same_problem_are_solved_too(method, monkeypatch):
    logits, y, _ = data_of("plain", 3, 5, 400, 4)
    small = method().fit(logits, y)
    monkeypatch.setattr(affine, "SMALL_PROBLEM", 0)
    large = method().fit(logits, y)
    assert small.result_.converged
    assert large.result_.converged
    # A constant added to all logits of a sample says nothing: only a ridge near 0 fixes it.
    found, expected = (one.transform(logits) - one.transform(logits).mean(1, keepdims=True) for one in (large, small))
    np.testing.assert_allclose(found, expected, atol=1e-3)
