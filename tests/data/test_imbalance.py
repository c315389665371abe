import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.data import imbalance
from longtail.data.imbalance import (
    ClassSubsample,
    long_tail_counts,
    long_tail_indices,
    subsample_per_class,
    validation_indices,
)
from longtail.errors import UserError


def test_counts_equal_the_published_ones(golden):
    compared = 0
    for case in golden("lt_profile"):
        for key, expected in case.items():
            match = re.fullmatch(r"counts_K(\d+)_max(\d+)_ir(\d+)_(exp|step)", key)
            if not match:
                continue
            classes, largest, factor = (int(match[i]) for i in (1, 2, 3))
            ours = long_tail_counts(classes, largest, factor, match[4])
            # With an odd number of classes the published step profile leaves the last one out.
            assert ours[: len(expected)].tolist() == expected.tolist()
            assert len(ours) == classes
            compared += 1
    assert compared == 21


@pytest.mark.parametrize(("name", "classes", "largest"), [("cifar10", 10, 5000), ("cifar100", 100, 500)])
@pytest.mark.parametrize("profile", ["exp", "step"])
@pytest.mark.parametrize("factor", [10, 50, 100, 200])
def test_counts_of_the_real_data_sets(shared, name, classes, largest, profile, factor):
    path = shared / "golden" / "class_counts" / f"{name}_{profile}_ir{factor}.json"
    expected = json.loads(path.read_text())
    assert long_tail_counts(classes, largest, factor, profile).tolist() == expected


@given(st.integers(2, 60), st.integers(1, 5000), st.floats(1, 500), st.sampled_from(["exp", "step"]))
def test_counts_fall_from_largest_to_its_share(classes, largest, factor, profile):
    counts = long_tail_counts(classes, largest, factor, profile)
    assert counts[0] == largest
    assert (np.diff(counts) <= 0).all()
    assert abs(counts[-1] - largest / factor) <= 1


def test_kept_images_depend_on_the_seed_alone_and_are_nested():
    labels = np.random.default_rng(0).integers(0, 5, 2000)
    few, many = np.array([100, 50, 20, 10, 5]), np.array([200, 100, 40, 20, 10])
    kept = long_tail_indices(labels, few, seed=3)
    assert np.bincount(labels[kept]).tolist() == few.tolist()
    assert (kept == long_tail_indices(labels, few, seed=3)).all()
    assert set(kept) < set(long_tail_indices(labels, many, seed=3))
    assert set(kept) != set(long_tail_indices(labels, few, seed=4))


def test_the_standard_subset_is_that_of_the_code_of_ldam_drw():
    labels = np.random.default_rng(0).integers(0, 5, 2000)
    counts = [200, 100, 40, 20, 10]
    np.random.seed(0)
    expected = []
    for label, count in enumerate(counts):
        indices = np.where(labels == label)[0]
        np.random.shuffle(indices)
        expected += indices[:count].tolist()
    assert long_tail_indices(labels, np.array(counts), None).tolist() == sorted(expected)


@pytest.mark.parametrize(("counts", "message"), [([5, 0], "class 1 is left without"), ([9, 1], "class 0 has 6 images")])
def test_impossible_counts_are_named(counts, message):
    with pytest.raises(UserError, match=message):
        long_tail_indices(np.array([0] * 6 + [1] * 6), np.array(counts), seed=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0.01, 0.99), st.integers(0, 5))
def test_validation_split_is_a_partition_and_leaves_every_class_an_image(counts, fraction, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    train, validation = validation_indices(labels, fraction, seed)
    assert sorted([*train, *validation]) == list(range(len(labels)))
    left = np.bincount(labels[train], minlength=len(counts))
    assert (left >= 1).all()
    held_out = np.bincount(labels[validation], minlength=len(counts))
    for count, held in zip(counts, held_out, strict=True):
        assert held == min(max(round(fraction * count), 1), count - 1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 3))
def test_a_subsample_per_class_are_as_many_as_there_are_and_no_more(labels, most, seed):
    labels = np.array(labels)
    rows = subsample_per_class(labels, most, seed)
    taken, there = np.bincount(labels[rows], minlength=5), np.bincount(labels, minlength=5)
    assert taken.tolist() == np.minimum(there, most).tolist()
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert set(rows) <= set(subsample_per_class(labels, most + 1, seed))


def test_the_seed_decides_the_subsample_and_every_image_can_be_chosen():
    labels = np.repeat([0, 1], [30, 3])
    draws = [subsample_per_class(labels, 5, seed) for seed in range(60)]
    np.testing.assert_array_equal(draws[0], subsample_per_class(labels, 5, 0))
    assert {row for rows in draws for row in rows.tolist()} == set(range(33))
    with pytest.raises(UserError, match="images_per_class must be a whole number of at least 1, not 0"):
        ClassSubsample(0)


@pytest.mark.parametrize("sizes", [[50, 30, 20, 9, 4], [7, 7], [3, 90, 40, 2]])
def test_images_held_out_of_the_head_cost_the_tail_nothing(sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    train, validation = validation_indices(labels, 0.1, 0, only_head=True)
    held = np.bincount(labels[validation], minlength=len(sizes))
    larger = np.argsort(-np.array(sizes), kind="stable")[: (len(sizes) + 1) // 2]
    assert sorted(np.flatnonzero(held)) == sorted(larger)
    np.testing.assert_array_equal(held[larger], [max(round(0.1 * sizes[label]), 1) for label in larger])
    assert sorted([*train, *validation]) == list(range(len(labels)))


@pytest.mark.parametrize("factor", [1, 2, 5, 10, 25, 50])
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_a_test_profile_is_exponential_along_the_training_order(factor, order):
    """The rule of LADE, class by class."""
    rng = np.random.default_rng(1)
    labels, class_order = rng.permutation(np.repeat(np.arange(10), 100)), rng.permutation(10)
    rows = imbalance.profile_indices(labels, factor, order, class_order=class_order)
    assert rows.tolist() == sorted(set(rows.tolist()))
    counts = np.bincount(labels[rows], minlength=10)
    for position, label in enumerate(class_order):
        rank = position if order == "forward" else 9 - position
        assert counts[label] == int(100 * (1 / factor) ** (rank / 9))
    assert rows.tolist() == imbalance.profile_indices(labels, factor, order, class_order=class_order).tolist()
    if factor > 1:
        smaller = imbalance.profile_indices(labels, factor / 2, order, class_order=class_order)
        assert set(rows) <= set(smaller)
        other = imbalance.profile_indices(labels, factor, order, class_order=class_order, seed=1)
        assert set(rows) != set(other)
    else:
        assert len(rows) == 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 2, "order": "sideways"}, "sideways"),
        ({"factor": 0.5}, "must be at least 1, not 0.5"),
        ({"factor": 50}, "class 2 is left without images"),
        ({"factor": 2, "class_order": np.array([0, 1, 1])}, r"each of the classes 0\.\.2 once"),
        ({"factor": 2, "class_order": np.arange(4)}, "a class has no test image"),
    ],
)
def test_mistakes_in_a_test_profile_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        imbalance.profile_indices(np.repeat([0, 1, 2], 10), **settings)
