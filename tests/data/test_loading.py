from itertools import islice

import numpy as np
import pytest
import torch

from longtail.data import loading
from longtail.data.augment import training_transform
from longtail.data.images import MemoryImages
from longtail.data.loading import in_order, load
from longtail.data.samplers import Draw, Sampler


@pytest.fixture
def images():
    pixels = torch.randint(0, 256, (100, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return MemoryImages(labels=torch.arange(100) % 3, class_names=("a", "b", "c"), pixels=pixels)


@pytest.fixture
def transform():
    names = ("small-crop", "flip", "autoaugment", "cutout")
    return training_transform(names, (0.5,) * 3, (0.2,) * 3, image_size=None, seed=3)


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
