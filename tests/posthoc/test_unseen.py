"""Held-out samples that are training samples are refused."""

import numpy as np
import pytest

from longtail import MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment, TauNorm, TemperatureScaling
from longtail.posthoc.held_out import require_unseen
from longtail.posthoc.inputs import fit_outputs, from_arrays

from .conftest import RNG


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
