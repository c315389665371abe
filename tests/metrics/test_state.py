import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from longtail import Outputs
from longtail.metrics.margins import describe_state, rank_correlation
from longtail.metrics.scores import evaluate


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=3, max_size=12))
def test_rank_correlation_agrees_with_scipy(pairs):
    """Small whole numbers: many are equal and share their rank."""
    first, second = np.array(pairs).T
    varying = len(set(first)) > 1 and len(set(second)) > 1
    expected = spearmanr(first, second).statistic if varying else 0.0
    assert rank_correlation(first, second) == pytest.approx(expected, abs=1e-9)


def test_two_values_correlate_and_one_does_not():
    assert rank_correlation(np.array([1.0, 2.0]), np.array([7, 5])) == -1
    assert rank_correlation(np.array([1.0]), np.array([7])) == 0
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([7, 7, 7])) == 0


def test_a_state_describes_the_logits_it_is_given():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(60, 4)), np.arange(60) % 3  # no image of the last class
    outputs = Outputs(labels, np.array([500, 60, 30, 4]), logits=np.zeros((60, 4)), split="test")
    state = describe_state("after", logits, outputs, 8)
    expected = evaluate(logits, labels, [500, 60, 30, 4])
    assert (state.title, state.parameters, state.metrics) == ("after", 8, expected)
    np.testing.assert_array_equal(state.predictions, logits.argmax(1))
    means = [logits[labels == label, label].mean() for label in range(3)]
    assert state.correlation["logits"] == pytest.approx(spearmanr(means, [500, 60, 30]).statistic)
    assert describe_state("before", logits, outputs).parameters is None
    share, confidence, accuracy = state.reliability
    assert np.nansum(share * np.abs(confidence - accuracy)) == pytest.approx(expected.ece)
