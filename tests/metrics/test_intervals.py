"""Intervals hold what they promise: in simulations they cover the truth 92 to 98 times in 100."""

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
    assert over_seeds([0.5, 0.6]).low is None  # two seeds say too little of their spread


def test_with_one_seed_and_many_images_it_is_the_plain_standard_error():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [3000, 2000, 1000])
    first, second = rng.random((2, 6000)) < np.array([[0.8], [0.7]])
    ours = paired_difference(first, second, labels)
    change = first.astype(float) - second
    of_class = [change[labels == c] for c in range(3)]
    error = np.sqrt(sum(own.var(ddof=1) / len(own) for own in of_class)) / 3
    assert ours.value == pytest.approx(np.mean([own.mean() for own in of_class]))
    assert ours.high - ours.low == pytest.approx(2 * 1.96 * error, rel=0.01)


def test_pairing_makes_intervals_narrow_and_equal_methods_differ_by_nothing():
    rng = np.random.default_rng(1)
    labels = np.arange(1000) % 5
    first = rng.random(1000) < 0.7
    second = first.copy()
    second[:20] = ~second[:20]
    paired = paired_difference(first, second, labels)
    assert paired.half_width < 0.015
    same = paired_difference(first, first, labels)
    assert same.value == 0
    assert 0 < same.half_width < 0.005
    assert not same.excludes_zero


def test_seeds_that_disagree_make_it_wide():
    """Differences of +11.7, -0.3 and +5.2 points: what the images alone say is far too sure."""
    rng = np.random.default_rng(2)
    labels = np.arange(600) % 10
    second = rng.random((3, 600)) < 0.6
    first = second | (rng.random((3, 600)) < np.array([[0.30], [0.0], [0.13]]))
    together = paired_difference(first, second, labels)
    assert together.low < 0 < together.high
    assert paired_difference(first.mean(0), second.mean(0), labels).low > 0  # as if it were one seed


def simulated(rng, seeds, sizes, gain, disagreement, of_seed):
    """Hits of two methods; `gain` is the true difference, `of_seed` the spread of a seed's own difference."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    mean = gain + rng.normal(0, of_seed, (seeds, 1))
    draw = rng.random((seeds, len(labels)))
    better = draw < (disagreement + mean) / 2
    return better, (draw < disagreement) & ~better, labels


@pytest.mark.parametrize(
    ("seeds", "sizes", "of_seed"),
    [
        (1, [200] * 5, 0.0),
        (1, [40] * 30, 0.0),
        (1, [4] * 34, 0.0),
        (1, [1] * 60, 0.0),
        (3, [60] * 10, 0.03),
        (3, [1000] * 10, 0.01),
        (5, [10] * 100, 0.02),
    ],
)
def test_a_difference_covers_the_truth(seeds, sizes, of_seed):
    rng = np.random.default_rng(0)
    trials, hits = 600, 0
    for _ in range(trials):
        interval = paired_difference(*simulated(rng, seeds, sizes, 0.05, 0.3, of_seed))
        hits += interval.low <= 0.05 <= interval.high
    assert 0.92 <= hits / trials <= 0.98


@pytest.mark.parametrize("size", [4, 15, 100, 1000])
def test_a_difference_of_one_class_covers_the_truth(size):
    rng = np.random.default_rng(0)
    first, second, labels = simulated(rng, 1, [size] * 3000, 0.1, 0.4, 0.0)
    found = class_differences(first, second, labels, 3000)
    covered = ((found.low <= 0.1) & (found.high >= 0.1)).mean()
    assert 0.92 <= covered <= (0.98 if size > 4 else 1)  # of four images there are few different outcomes
    assert (found.high - found.low).min() > 0


def test_scores_over_seeds_cover_the_truth():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        interval = over_seeds(rng.normal(0.7, 0.02, 3).tolist())
        hits += interval.low <= 0.7 <= interval.high
    assert 0.92 <= hits / 1000 <= 0.98


def test_no_interval_collapses_where_a_class_has_one_image():
    found = class_differences(np.array([1, 0]), np.array([0, 0]), np.array([1, 3]), 4)
    np.testing.assert_array_equal(found.value, [np.nan, 1, np.nan, 0])
    assert np.isnan(found.low[[0, 2]]).all()
    assert (found.high[[1, 3]] - found.low[[1, 3]] > 0.5).all()
    assert (found.low[[1, 3]] <= found.value[[1, 3]]).all()
    assert (found.high[[1, 3]] <= 1).all()
    one = paired_difference(np.array([1, 1]), np.array([0, 0]), np.array([0, 1]))
    assert one.low < one.value < one.high
