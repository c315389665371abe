import numpy as np
import pytest
from scipy.stats import t

from longtail.metrics.intervals import class_differences, over_seeds, paired_difference


def test_interval_over_seeds_is_students():
    values = [0.71, 0.74, 0.70, 0.75]
    interval = over_seeds(values)
    half = t.ppf(0.975, 3) * np.std(values, ddof=1) / 2
    assert interval.value == pytest.approx(np.mean(values))
    assert interval.high - interval.value == pytest.approx(half)
    assert over_seeds([0.5]).low is None


def test_bootstrap_agrees_with_drawing_the_samples_one_by_one():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [300, 200, 100])
    first, second = rng.random((2, 600)) < np.array([[0.8], [0.7]])
    ours = paired_difference(first, second, labels)
    naive = []
    for _ in range(1000):
        means = []
        for c in range(3):
            drawn = rng.choice(np.flatnonzero(labels == c), (labels == c).sum())
            means.append(first[drawn].mean() - second[drawn].mean())
        naive.append(np.mean(means))
    assert ours.value == pytest.approx(
        np.mean([(first[labels == c].mean() - second[labels == c].mean()) for c in range(3)])
    )
    assert ours.low == pytest.approx(np.quantile(naive, 0.025), abs=0.01)
    assert ours.high == pytest.approx(np.quantile(naive, 0.975), abs=0.01)


def test_pairing_makes_intervals_narrow_and_equal_methods_differ_by_nothing():
    rng = np.random.default_rng(1)
    labels = np.arange(1000) % 5
    first = rng.random(1000) < 0.7
    second = first.copy()
    second[:20] = ~second[:20]
    paired = paired_difference(first, second, labels)
    assert paired.half_width < 0.015
    same = paired_difference(first, first, labels)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert not same.excludes_zero


def test_seeds_are_averaged_and_coverage_is_right():
    """In repeated experiments the interval holds the true difference about 95 times in 100."""
    rng = np.random.default_rng(2)
    labels = np.repeat([0, 1], 200)
    hits = 0
    for trial in range(200):
        first, second = rng.random((3, 400)) < 0.75, rng.random((3, 400)) < 0.7
        interval = paired_difference(first, second, labels, seed=trial)
        hits += interval.low <= 0.05 <= interval.high
    assert 180 <= hits <= 199


def test_classes_that_are_absent_are_left_out():
    changes, present = class_differences(np.array([1, 0]), np.array([0, 0]), np.array([4, 7]))
    assert present.tolist() == [4, 7]
    assert changes[0].tolist() == [1, 0]
