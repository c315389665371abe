"""MARC's solver on difficult data: convergence, parts, chunks, float32 and float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail import MARC

from .conftest import problem_data


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 12), st.floats(0, 2), st.floats(0.3, 8))
def test_exact_converges_whatever_the_classes_and_scales(seed, classes, gamma, scale):
    rng = np.random.default_rng(seed)
    counts = np.maximum((300 * 0.02 ** (np.arange(classes) / (classes - 1))).astype(int), 1)
    y = np.repeat(np.arange(classes), counts)
    logits = scale * (rng.normal(size=(len(y), classes)) + np.eye(classes)[y])
    marc = MARC(gamma=gamma).fit(logits, y, weight_norms=rng.uniform(0.2, 5, classes))
    assert marc.result_.converged
    assert marc.result_.iterations < 150


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(3, 12),
    st.floats(0, 2),
    st.sampled_from(["plain", "separable", "large", "alike", "constant"]),
)
def test_by_way_of_parts_it_is_the_same_answer_whatever_the_data(seed, classes, gamma, kind):
    from longtail.posthoc.solver import affine

    rng = np.random.default_rng(seed)
    counts = np.maximum((400 * 0.02 ** (np.arange(classes) / (classes - 1))).astype(int), 1)
    y = np.repeat(np.arange(classes), counts)
    logits = rng.normal(size=(len(y), classes)) + {"separable": 12, "large": 30}.get(kind, 1) * np.eye(classes)[y]
    if kind == "large":
        logits *= 10 * rng.normal(1, 0.5, len(y))[:, None]
    if kind == "alike":
        logits[:, 1] = logits[:, 0]
    if kind == "constant":
        logits[:, 2] = 0.7
    whole = MARC(gamma=gamma, tolerance=1e-8).fit(logits, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(affine, "SMALL_PROBLEM", 0)
        parts = MARC(gamma=gamma, tolerance=1e-8).fit(logits, y)
    assert whole.result_.converged
    assert parts.result_.converged
    # A shift common to all classes changes no answer.
    difference = parts.transform(logits) - whole.transform(logits)
    difference -= difference.mean(1, keepdims=True)
    assert np.abs(difference).max() <= 1e-5 * max(1.0, np.abs(logits).max())


def test_few_passes_are_enough(monkeypatch):
    from longtail.posthoc.solver import affine

    rng = np.random.default_rng(0)
    classes = 60
    counts = (400 * 0.01 ** (np.arange(classes) / (classes - 1))).astype(int)
    y = np.repeat(np.arange(classes), counts)
    logits = 1.5 * rng.normal(size=(len(y), classes)) + 3 * np.eye(classes)[y] + np.log(counts) / 2
    assert MARC().fit(logits, y).result_.iterations <= 14
    monkeypatch.setattr(affine, "SMALL_PROBLEM", 1 << 14)
    assert MARC().fit(logits, y).result_.iterations <= 13


def test_the_answer_does_not_depend_on_chunks_or_order(monkeypatch):
    from longtail.outputs import rows as logit_rows

    logits, y, _, norms = problem_data(counts=(300, 120, 50, 20))
    whole = MARC(tolerance=1e-6).fit(logits, y, weight_norms=norms)
    again = MARC(tolerance=1e-6).fit(logits, y, weight_norms=norms)
    assert (whole.omega_ == again.omega_).all()
    monkeypatch.setattr(logit_rows, "CHUNK_NUMBERS", 64)
    order = np.random.default_rng(0).permutation(len(y))
    pieces = MARC(tolerance=1e-6).fit(logits[order], y[order], weight_norms=norms)
    np.testing.assert_allclose(pieces.omega_, whole.omega_, atol=1e-4)
    np.testing.assert_allclose(pieces.beta_, whole.beta_, atol=1e-4)


def test_where_float32_is_not_enough_it_goes_on_in_float64(monkeypatch):
    from longtail.posthoc.solver import affine

    logits, y, _, norms = problem_data(counts=(3000, 900, 200, 30))
    monkeypatch.setattr(affine, "SMALL_PROBLEM", 0)
    marc = MARC(tolerance=1e-10).fit(logits, y, weight_norms=norms)
    assert marc.result_.converged
    assert marc.result_.gradient <= 1e-10
