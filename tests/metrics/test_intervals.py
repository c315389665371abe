"""Intervals hold what they promise: in simulations they cover the truth 92 to 98 times in 100."""

import numpy as np
import pytest
from scipy.stats import t

from longtail.metrics.intervals import (
    Interval,
    _possible,
    class_differences,
    fallen_classes,
    over_seeds,
    paired_difference,
)


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
    assert one.low < 0.5 < one.value == one.high == 1  # and no interval goes beyond what is possible


def plain_interval(first, second, labels):
    """The formulas of the module's head, image by image."""
    change = np.asarray(first, float) - np.asarray(second, float)
    seeds, classes = len(change), len(set(labels))
    mean = change.mean(0)
    everything = (len(mean) + 2, mean.sum(), np.square(mean).sum() + 1)
    of_images, freedom, both, per_seed = 0.0, 0.0, 0.0, []
    for label in sorted(set(labels)):
        own = change[:, labels == label]
        size = own.shape[1]
        square = (np.square(own.mean(0)).sum() + 2 * everything[2] / everything[0]) / (size + 2)
        centre = (own.mean(0).sum() + 2 * everything[1] / everything[0]) / (size + 2)
        part = (square - centre**2) / (size * classes**2)
        of_images, freedom = of_images + part, freedom + part**2 / (size + 1)
        per_seed.append(own.mean(1))
        rest = own - own.mean(0) - own.mean(1, keepdims=True) + own.mean()
        both += np.square(rest).sum() / ((size - 1) * (seeds - 1)) / (size * seeds * classes**2) if seeds > 1 else 0
    value = np.mean(per_seed)
    if seeds < 3:
        return value, t.ppf(0.975, of_images**2 / freedom) * np.sqrt(of_images)
    of_seeds = np.mean(per_seed, 0).var(ddof=1) / seeds
    variance = max(of_seeds + of_images - both, of_seeds, of_images)
    return value, t.ppf(0.975, variance**2 / (of_seeds**2 / (seeds - 1) + freedom)) * np.sqrt(variance)


@pytest.mark.parametrize("seeds", [1, 2, 3, 4])
def test_a_difference_is_that_of_the_formula(seeds):
    """Few images and seeds, so that every part of the variance matters."""
    rng = np.random.default_rng(seeds)
    labels = np.repeat([0, 1, 2], [2, 4, 7])
    for rate in (0.3, 0.6, 0.9):
        first, second = rng.random((seeds, 13)) < rate, rng.random((seeds, 13)) < 0.5
        ours = paired_difference(first, second, labels)
        value, half = plain_interval(first, second, labels)
        assert ours.value == pytest.approx(value)
        assert ours.half_width == pytest.approx(half)
        assert ours.high == pytest.approx(value + half)


def test_a_difference_of_one_class_is_an_adjusted_walds():
    first, second = np.array([1, 1, 1, 0, 0, 1, 0, 0]), np.array([0, 1, 0, 1, 0, 0, 1, 1])
    labels = np.array([0, 0, 0, 0, 0, 2, 3, 3])
    found = class_differences(first, second, labels, 5)
    np.testing.assert_allclose(found.value, [1 / 5, np.nan, 1, -1, np.nan])
    # Five images, changes +1, 0, +1, -1, 0: half an image more in each of the four cells.
    centre, half = 1 / 7, 1.959964 * np.sqrt(3 + 1 - 1 / 7) / 7
    assert (found.low[0], found.high[0]) == pytest.approx((centre - half, centre + half))
    for bound in (found.low, found.high):
        np.testing.assert_array_equal(np.isnan(bound), [False, True, False, False, True])
    assert (found.low[3], found.high[2]) == (-1, 1)  # no accuracy changes by more than 1
    everywhere = class_differences(np.ones(400), np.zeros(400), np.zeros(400, int), 1)
    assert (everywhere.value[0], everywhere.high[0]) == (1, 1)
    assert class_differences(np.zeros(400), np.ones(400), np.zeros(400, int), 1).low[0] == -1


def test_classes_that_fell_are_named_the_deepest_first():
    labels = np.repeat([0, 1, 2], 40)
    before = np.ones(120, bool)
    after = np.concatenate([np.arange(40) >= 10, np.arange(40) >= 39, np.arange(40) >= 30])
    fallen = fallen_classes(before, after, labels, ("cat", "dog", "owl"))
    assert [str(one) for one in fallen] == ["dog (100 → 2)", "owl (100 → 25)", "cat (100 → 75)"]
    assert fallen_classes(after, before, labels, ("cat", "dog", "owl")) == []
    half = np.concatenate([np.arange(40) % 2 == 0, np.arange(40) % 4 != 0, np.ones(40, bool)])
    gone = fallen_classes(half, np.zeros(120, bool), labels, ("cat", "dog", "owl"))
    assert [str(one) for one in gone] == ["owl (100 → 0)", "dog (75 → 0)", "cat (50 → 0)"]
    a_little = before.copy()
    a_little[0] = False  # one image of forty is within the interval
    assert fallen_classes(before, a_little, labels, ("cat", "dog", "owl")) == []


def test_a_difference_of_accuracies_ends_at_minus_one_and_one():
    ended = _possible(Interval(0.5, -1.7, 1.3))
    assert (ended.value, ended.low, ended.high) == (0.5, -1.0, 1.0)
    inside = _possible(Interval(0.5, -0.7, None))
    assert (inside.low, inside.high) == (-0.7, None)
