"""Held-out samples: training samples are refused, folds are stratified, logits are out of fold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail import HALO, MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment, TauNorm, TemperatureScaling, Tempered
from longtail.posthoc.held_out import compared_with_training, number_of_folds, out_of_fold_logits, stratified_folds
from longtail.posthoc.inputs import fit_outputs, from_arrays, from_outputs

from .conftest import RNG, outputs


def require_unseen(train, held_out):
    """Refused, or returned as samples that were not seen."""
    assert not compared_with_training(train, held_out, refuse=True).seen


def test_samples_of_the_training_set_are_no_held_out_samples():
    rows = np.arange(80.0).reshape(40, 2)
    labels = np.arange(40) % 2
    train = from_arrays(rows, labels)
    new = -1 - rows
    for shared, refused in ((0, False), (1, False), (4, False), (5, True), (40, True)):
        held = from_arrays(np.concatenate([rows[:shared], new[shared:]]), labels)
        if refused:
            with pytest.raises(UserError, match=f"{shared} of 40 held-out samples are training samples too"):
                require_unseen(train, held)
        else:
            require_unseen(train, held)
    one = from_arrays(np.concatenate([rows[:1], new[1:4]]), labels[:4])
    require_unseen(train, one)  # a single duplicate is chance, however few samples there are
    with pytest.raises(UserError, match="2 of 4"):
        require_unseen(train, from_arrays(np.concatenate([rows[:2], new[2:4]]), labels[:4]))


def test_equal_logits_of_other_features_are_other_samples():
    rows, labels = np.ones((20, 2)), np.arange(20) % 2
    known, other = (from_arrays(rows, labels, features=RNG.normal(size=(20, 3))) for _ in range(2))
    require_unseen(known, other)
    without = from_arrays(rows, labels)
    for pair in ((known, without), (without, known), (without, from_arrays(rows, labels))):
        with pytest.raises(UserError, match="20 of 20"):
            require_unseen(*pair)
    with pytest.raises(UserError, match="training outputs have 3 features per sample, held-out outputs 2"):
        require_unseen(known, from_arrays(rows, labels, features=np.ones((20, 2))))


def test_a_few_images_per_class_are_enough_to_find_them():
    """Of 1,000 images of class 0 only 50 are at hand, so of 200 held-out copies of them about 10 are found."""
    rows, labels = RNG.normal(size=(1100, 2)), np.repeat([0, 1], [1000, 100])
    kept = np.concatenate([RNG.permutation(1000)[:50], np.arange(1000, 1050)])
    few = from_arrays(rows[kept], labels[kept], class_counts=[1000, 100])
    copies = from_arrays(rows[:1000:5], labels[:1000:5], need_every_class=False, classes=np.arange(2))
    with pytest.raises(UserError, match="of 200 held-out samples are training samples too"):
        require_unseen(few, copies)
    some = np.concatenate([rows[kept[:2]], RNG.normal(size=(198, 2))])  # duplicates in the data set
    require_unseen(few, from_arrays(some, labels[:200], need_every_class=False, classes=np.arange(2)))


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_copies_with_noise_are_warned_of_and_new_samples_are_not(width):
    rng = np.random.default_rng(0)
    y, new = rng.integers(0, 3, 1000), rng.integers(0, 3, 200)
    means = rng.normal(size=(3, width))
    features, others = (means[labels] + rng.gamma(1, size=(len(labels), width)) for labels in (y, new))
    centres = means[new] + 1 + 1e-3 * rng.normal(size=others.shape)  # closer to all than these to each other
    copies = features[:200] + 1e-4 * rng.normal(size=others.shape)

    def samples(rows, labels):
        return from_arrays(rows @ np.ones((width, 3)), labels, features=rows)

    require_unseen(samples(features, y), samples(others, new))
    require_unseen(samples(features, y), samples(centres, new))
    with pytest.warns(UserWarning, match="of 200 held-out samples are nearly training samples"):
        require_unseen(samples(features, y), samples(copies, y[:200]))


def test_held_out_logits_in_other_units_are_warned_of():
    labels = np.repeat([0, 1], [60, 40])
    train, new = (from_arrays(RNG.normal(size=(100, 2)) + 2 * np.eye(2)[labels], labels) for _ in range(2))
    require_unseen(train, new)
    with pytest.warns(UserWarning, match="held-out logits are 3e[+]02 times as large as the training logits"):
        compared_with_training(train, from_arrays(new.rows.array * 300, labels), refuse=True)


@pytest.mark.parametrize("method", [MARC("auto"), TauNorm(), LogitAdjustment("auto"), TemperatureScaling()])
def test_what_is_chosen_or_fitted_on_held_out_images_refuses_training_images(method):
    rows, labels = RNG.normal(size=(40, 3)), np.arange(40) % 3
    train = Outputs(labels, np.bincount(labels), logits=rows, split="train")
    held_out = Outputs(labels, np.bincount(labels), logits=rows, split="validation")
    with pytest.raises(UserError, match="40 of 40 held-out samples are training samples too"):
        fit_outputs(method, train, held_out)
    if not method.fitted_on_unseen:
        with pytest.raises(UserError, match="40 of 40"):
            method.fit(train, validation=held_out)
    # Logits of cross-validation are held out from both the fit and the choice.
    method.fit(rows, labels, validation=(rows, labels))


def test_training_images_may_be_scored_where_nothing_is_chosen_on_them():
    rows, labels = RNG.normal(size=(40, 3)), np.arange(40) % 3
    train = Outputs(labels, np.bincount(labels), logits=rows, split="train")
    fit_outputs(MARC(), train, train)
    fit_outputs(TemperatureScaling(), None, train)


@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=60), seed=st.integers(0, 9), keep_single=st.booleans())
@settings(max_examples=60, deadline=None)
def test_folds_leave_out_every_sample_once_and_spread_every_class(labels, seed, keep_single):
    labels = np.array(labels)
    counts = np.bincount(labels)
    folds = stratified_folds(labels, number_of_folds(counts), seed, keep_single=keep_single)
    left_out = np.concatenate(folds)
    assert sorted(left_out) == np.flatnonzero(counts[labels] > keep_single).tolist()
    for label in np.flatnonzero(counts > keep_single):
        assert np.ptp([np.sum(labels[fold] == label) for fold in folds]) <= 1
    if keep_single:
        assert all(set(np.delete(labels, fold)) == set(labels) for fold in folds)


def test_the_smallest_class_of_two_or_more_decides_the_number_of_folds():
    for counts, number in (([9, 1, 2], 3), ([9, 4], 4), ([9, 9], 5), ([1, 1], 5)):
        assert number_of_folds(np.array(counts)) == number
    folds = [stratified_folds(np.arange(40) % 4, 5, seed) for seed in (0, 0, 1)]
    assert all((one == other).all() for one, other in zip(folds[0], folds[1], strict=True))
    assert any((one != other).any() for one, other in zip(folds[0], folds[2], strict=True))


TRAIN, HELD_OUT = from_outputs(outputs()), from_outputs(outputs("validation", seed=3))
FOLDS = stratified_folds(HELD_OUT.labels.numpy(), 3, seed=0)


@pytest.mark.parametrize("method", [HALO(), Tempered(HALO()), Tempered(MARC())], ids=["HALO", "HALO+", "MARC+"])
def test_what_uses_held_out_samples_is_fitted_again_without_each_fold(method):
    method.fit_checked(TRAIN, HELD_OUT)
    found = out_of_fold_logits(method, TRAIN, HELD_OUT, FOLDS).numpy()
    logits, features = HELD_OUT.rows.read(slice(None)), np.asarray(HELD_OUT.features)
    for fold in FOLDS:
        kept = HELD_OUT.subset(np.delete(np.arange(len(HELD_OUT.labels)), fold))
        alone = type(method)(**method.get_params(deep=False)).fit_checked(TRAIN, kept)
        np.testing.assert_allclose(found[fold], alone.transform(logits[fold], features[fold]), atol=1e-4)
        assert np.abs(found[fold] - method.transform(logits[fold], features[fold]).numpy()).max() > 1e-3


@pytest.mark.parametrize("method", [MARC(), MARC("auto"), LogitAdjustment("auto")], ids=str)
def test_what_only_chooses_a_setting_on_them_is_applied_as_it_is(method):
    method.fit_checked(TRAIN, HELD_OUT)
    assert method.refitted(TRAIN, HELD_OUT.subset(np.arange(12))) is method
    found = out_of_fold_logits(method, TRAIN, HELD_OUT, FOLDS)
    np.testing.assert_array_equal(found, method.transform(HELD_OUT.rows.read(slice(None))))


@pytest.mark.parametrize("method", [MARC(), MARC("auto")], ids=str)
def test_what_is_fitted_on_cross_validated_samples_is_fitted_again_with_the_same_setting(method):
    method.fit_checked(HELD_OUT, HELD_OUT)
    found = out_of_fold_logits(method, HELD_OUT, HELD_OUT, FOLDS).numpy()
    for fold in FOLDS:
        kept = HELD_OUT.subset(np.delete(np.arange(len(HELD_OUT.labels)), fold))
        alone = MARC(method.gamma_).fit_checked(kept, None)
        np.testing.assert_array_equal(found[fold], alone.transform(HELD_OUT.rows.read(fold)))


def test_a_fold_that_leaves_one_class_keeps_the_fit_on_all_samples():
    two = HELD_OUT.subset(np.arange(10))  # nine samples of the first class, one of the second
    halo = HALO().fit_checked(TRAIN, two)
    last = len(two.labels) - 1
    found = out_of_fold_logits(halo, TRAIN, two, [np.arange(last), np.array([last])])
    expected = halo.transform(two.rows.read(slice(last, None)), np.asarray(two.features)[last:])
    np.testing.assert_array_equal(found[last], expected[0])
