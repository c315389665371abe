import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.data.imbalance import Few, few_per_class, long_tail_counts, long_tail_indices, validation_indices
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


def test_factor_below_one_is_refused():
    with pytest.raises(UserError, match="at least 1, not 0.5"):
        long_tail_counts(10, 100, 0.5)
    with pytest.raises(UserError, match="at least 1, not nan"):
        long_tail_counts(10, 100, float("nan"))


def test_kept_images_depend_on_the_seed_alone_and_are_nested():
    labels = np.random.default_rng(0).integers(0, 5, 2000)
    few, many = np.array([100, 50, 20, 10, 5]), np.array([200, 100, 40, 20, 10])
    kept = long_tail_indices(labels, few, seed=3)
    assert np.bincount(labels[kept]).tolist() == few.tolist()
    assert (kept == long_tail_indices(labels, few, seed=3)).all()
    assert set(kept) < set(long_tail_indices(labels, many, seed=3))
    assert set(kept) != set(long_tail_indices(labels, few, seed=4))


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
def test_a_few_per_class_are_as_many_as_there_are_and_no_more(labels, most, seed):
    labels = np.array(labels)
    rows = few_per_class(labels, most, seed)
    taken, there = np.bincount(labels[rows], minlength=5), np.bincount(labels, minlength=5)
    assert taken.tolist() == np.minimum(there, most).tolist()
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert set(rows) <= set(few_per_class(labels, most + 1, seed))


def test_the_seed_decides_which_few_and_every_image_can_be_chosen():
    labels = np.repeat([0, 1], [30, 3])
    draws = [few_per_class(labels, 5, seed) for seed in range(60)]
    np.testing.assert_array_equal(draws[0], few_per_class(labels, 5, 0))
    assert {row for rows in draws for row in rows.tolist()} == set(range(33))
    with pytest.raises(UserError, match="images_per_class must be a whole number of at least 1, not 0"):
        Few(0)


@pytest.mark.parametrize("sizes", [[50, 30, 20, 9, 4], [7, 7], [3, 90, 40, 2]])
def test_images_held_out_of_the_head_cost_the_tail_nothing(sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    train, validation = validation_indices(labels, 0.1, 0, only_head=True)
    held = np.bincount(labels[validation], minlength=len(sizes))
    larger = np.argsort(-np.array(sizes), kind="stable")[: (len(sizes) + 1) // 2]
    assert sorted(np.flatnonzero(held)) == sorted(larger)
    np.testing.assert_array_equal(held[larger], [max(round(0.1 * sizes[label]), 1) for label in larger])
    assert sorted([*train, *validation]) == list(range(len(labels)))
