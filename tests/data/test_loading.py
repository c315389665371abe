"""Samplers are a function of the seed; batches depend on neither processes nor how they are read."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.data import loading
from longtail.data.augment import build_transform
from longtail.data.images import MemoryImages
from longtail.data.loading import SAMPLERS, Draw, Sampler, in_order, load

COUNTS = np.array([600, 250, 100, 40, 10])
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), COUNTS))


@pytest.mark.parametrize("name", SAMPLERS)
def test_shares_of_processes_make_up_the_stream(name):
    sampler = Sampler(LABELS, name, seed=1, epochs=4)
    for step in (0, 3, 30):  # 30 crosses an epoch's end
        whole = sampler.batch(step, 48)
        parts = [Sampler(LABELS, name, seed=1, epochs=4).batch(step, 48, rank, 3) for rank in range(3)]
        assert np.concatenate([part.indices for part in parts]).tolist() == whole.indices.tolist()
        assert np.concatenate([part.numbers for part in parts]).tolist() == whole.numbers.tolist()


@pytest.mark.parametrize("name", SAMPLERS)
def test_stream_is_a_function_of_seed_and_step(name):
    went_through = Sampler(LABELS, name, seed=7, epochs=3)
    for step in range(5):
        went_through.batch(step, 64)
    jumped = Sampler(LABELS, name, seed=7, epochs=3)
    assert (went_through.batch(5, 64).indices == jumped.batch(5, 64).indices).all()
    other = Sampler(LABELS, name, seed=8, epochs=3)
    assert (other.batch(5, 64).indices != jumped.batch(5, 64).indices).any()


def test_instance_sampler_shows_every_image_once_an_epoch():
    sampler = Sampler(LABELS, "instance")
    for epoch in range(2):
        assert sorted(sampler.draws(epoch * 1000, 1000).indices) == list(range(1000))


@pytest.mark.parametrize(("name", "exponent"), [("class-balanced", 0), ("square-root", 0.5), ("reversed", -1)])
def test_class_shares_follow_the_power_of_the_counts(name, exponent):
    drawn = LABELS[Sampler(LABELS, name).draws(0, 100_000).indices]
    expected = COUNTS ** float(exponent) / (COUNTS ** float(exponent)).sum()
    assert np.bincount(drawn) / 100_000 == pytest.approx(expected, abs=0.006)


def test_items_of_a_class_are_drawn_evenly():
    drawn = Sampler(LABELS, "class-balanced").draws(0, 200_000).indices
    smallest = np.bincount(drawn, minlength=1000)[LABELS == 4]
    assert smallest.sum() == pytest.approx(40_000, rel=0.02)
    assert smallest.std() / smallest.mean() < 0.04


def test_progressive_goes_from_instance_to_class_balanced():
    sampler = Sampler(LABELS, "progressive", epochs=5)
    assert sampler.class_probabilities(0) == pytest.approx(COUNTS / 1000)
    assert sampler.class_probabilities(2) == pytest.approx(0.6 * COUNTS / 1000 + 0.4 * 0.2)
    assert sampler.class_probabilities(4) == pytest.approx(0.2 * COUNTS / 1000 + 0.8 * 0.2)
    assert sampler.class_probabilities(9) == pytest.approx([0.2] * 5)


@pytest.mark.parametrize(("epochs", "balanced_from"), [(6, 3), (5.9, 3), (6.1, 3), (1, 1)])
def test_deferred_is_instance_then_class_balanced(epochs, balanced_from):
    sampler = Sampler(LABELS, "deferred", epochs=epochs)
    for epoch in range(5):
        drawn = sampler.draws(1000 * epoch, 1000).indices
        if epoch < balanced_from:
            assert sorted(drawn) == list(range(1000))
        else:
            assert sampler.class_probabilities(epoch) == pytest.approx([0.2] * 5)
            assert np.bincount(LABELS[drawn]) == pytest.approx([200] * 5, abs=50)


def test_reversed_class_weights_agree_with_bbn(golden):
    for case in golden("bbn"):
        counts = case["class_counts"]
        if counts.sum() > 100_000:
            counts = counts[-10:]  # a tail of the case is enough and small
            expected = (1 / counts) / (1 / counts).sum()
        else:
            expected = case["reversed_class_prob"]
        labels = np.repeat(np.arange(len(counts)), counts)
        assert Sampler(labels, "reversed").class_probabilities(0) == pytest.approx(expected, rel=1e-12)


def test_oversampling_repeats_and_undersampling_leaves_out():
    over = Sampler(LABELS, "oversample")
    assert over.epoch_length == 5 * 600
    drawn = over.draws(0, over.epoch_length).indices
    assert np.bincount(LABELS[drawn]).tolist() == [600] * 5
    assert len(set(drawn)) == 1000  # no image is left out
    under = Sampler(LABELS, "undersample")
    drawn = under.draws(0, under.epoch_length).indices
    assert np.bincount(LABELS[drawn]).tolist() == [10] * 5
    assert len(set(drawn)) == 50  # no image twice


@given(st.integers(0, 3000), st.integers(1, 2500))
def test_any_window_of_the_stream_agrees_with_the_whole(first, count):
    sampler = Sampler(LABELS, "square-root", seed=2)
    assert (sampler.draws(first, count).indices == sampler.draws(0, first + count).indices[first:]).all()


@pytest.fixture
def images():
    pixels = torch.randint(0, 256, (100, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return MemoryImages(labels=torch.arange(100) % 3, class_names=("a", "b", "c"), pixels=pixels)


@pytest.fixture
def transform():
    names = ("small-crop", "flip", "autoaugment", "cutout")
    return build_transform(names, (0.5,) * 3, (0.2,) * 3, image_size=None, seed=3)


@pytest.mark.parametrize("together", [1, 20 * 64, 1000 * 64])
def test_batches_do_not_depend_on_how_many_are_augmented_together(images, transform, monkeypatch, together):
    sampler = Sampler(images.labels.numpy(), seed=1)
    plan = [sampler.batch(number, 7, rank=1, world_size=2) for number in range(9)]
    plan.insert(4, Draw(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)))
    monkeypatch.setattr(loading, "PIXELS_AT_ONCE", together)
    batches = list(load(images, transform, plan))
    assert len(batches) == len(plan)
    for draw, batch in zip(plan, batches, strict=True):
        numbers = torch.from_numpy(transform.numbers(draw.numbers))
        expected = transform.normalise(transform.augment(images.pixels[draw.indices], numbers))
        assert torch.equal(batch.images, expected)
        assert batch.indices.tolist() == draw.indices.tolist()
        assert batch.labels.tolist() == (draw.indices % 3).tolist()


def test_an_endless_plan_is_read_as_far_as_it_is_needed(images, transform):
    sampler = Sampler(images.labels.numpy(), seed=1)
    plan = (sampler.batch(number, 64) for number in range(10**9))
    assert [len(batch.labels) for batch in islice(load(images, transform, plan), 3)] == [64, 64, 64]


def test_every_image_once_whatever_the_number_of_processes():
    for world_size in (1, 2, 3):
        draws = [draw for rank in range(world_size) for draw in in_order(50, 8, rank=rank, world_size=world_size)]
        assert sorted(np.concatenate([draw.indices for draw in draws])) == list(range(50))
        assert all(draw.numbers.tolist() == draw.indices.tolist() for draw in draws)
