from pathlib import Path

import torch
from sklearn.datasets import load_digits

from longtail.config import DataConfig
from longtail.data.sources import SOURCES, read_digits
from longtail.data.splits import open_splits


def read():
    splits = read_digits(DataConfig(data="digits"), Path())
    return splits.train, splits.test


def test_digits_are_those_of_scikit_learn():
    table = load_digits()
    theirs = zip((table.images * 255 / 16).round().tolist(), table.target.tolist(), strict=True)
    ours = []
    for images in read():
        ours += zip(images.pixels[:, 0].tolist(), images.labels.tolist(), strict=True)
    assert sorted(ours) == sorted(theirs)


def test_digits_are_real_split_and_never_shared():
    train, test = read()
    assert len(train) + len(test) == 1797
    assert test.class_counts.tolist() == [60] * 10
    assert train.pixels.shape[1:] == (1, 8, 8)
    assert int(train.pixels.max()) == 255
    pixels = train.pixels.float() / 255
    (mean,), (std,) = SOURCES["digits"].statistics
    assert abs(float(pixels.mean()) - mean) < 0.01
    assert abs(float(pixels.std()) - std) < 0.01


def test_test_split_does_not_depend_on_the_seed():
    first, second = (open_splits(DataConfig(data="digits", profile="exp", imbalance=20, seed=s)) for s in (0, 1))
    assert torch.equal(first.test.pixels, second.test.pixels)
    assert first.train.class_counts.tolist() == second.train.class_counts.tolist()
    assert not torch.equal(first.train.pixels, second.train.pixels)


def test_no_image_is_in_two_splits():
    splits = open_splits(DataConfig(data="digits", profile="exp", imbalance=20))
    as_sets = [{bytes(p.numpy().tobytes()) for p in part.pixels} for part in (splits.train, splits.validation)]
    assert len(as_sets[0] & as_sets[1]) <= 1  # the digits hold a few equal images
