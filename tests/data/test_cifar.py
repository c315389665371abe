import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from longtail.config import DataConfig
from longtail.data.cifar import read_cifar, read_digits
from longtail.data.splits import SOURCES, open_splits
from longtail.errors import UserError
from longtail.recipes import RECIPES

CIFAR10 = DataConfig(data="cifar10")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_both_layouts_hold_the_same_images(cifar_root, name):
    python, binary = (read_cifar(DataConfig(data=name), cifar_root / layout) for layout in ("python", "binary"))
    classes = 10 if name == "cifar10" else 100
    for split, size in (("train", 50_000), ("test", 10_000)):
        ours, theirs = getattr(python, split), getattr(binary, split)
        assert ours.pixels.shape == (size, 3, 32, 32)
        assert ours.pixels.dtype == torch.uint8
        assert ours.class_counts.tolist() == [size // classes] * classes
        assert torch.equal(ours.pixels, theirs.pixels)
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.class_names == theirs.class_names
    assert python.train.class_names[0] == ("airplane" if name == "cifar10" else "apple")


def test_long_tail_has_the_published_counts(cifar_root):
    root = str(cifar_root / "binary")
    splits = open_splits(DataConfig(data="cifar10", root=root, profile="exp", imbalance=100, validation=0))
    assert splits.train.class_counts.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert splits.validation is None
    shuffled = open_splits(
        DataConfig(data="cifar10", root=root, profile="exp", imbalance=100, validation=0, shuffle_classes=True, seed=1)
    )
    assert sorted(shuffled.train.class_counts.tolist()) == sorted(splits.train.class_counts.tolist())
    assert shuffled.train.class_counts.tolist() != splits.train.class_counts.tolist()


def cut(path, size=-100):
    return path.read_bytes()[:size]


DAMAGES = [
    ("binary", "data_batch_3.bin", cut, "data_batch_3.bin is cut short"),
    ("binary", "data_batch_3.bin", lambda path: cut(path, 3073 * 9000), "49000 images where 50000"),
    ("python", "test_batch", lambda path: cut(path, 100_000), "test_batch is not a CIFAR file, or is cut short"),
    ("binary", "data_batch_1.bin", lambda path: b"\x17" + path.read_bytes()[1:], r"label 23, outside 0\.\.9"),
    ("binary", "data_batch_4.bin", None, "data_batch_4.bin is missing"),
]


@pytest.mark.parametrize(("layout", "name", "change", "message"), DAMAGES)
def test_damaged_files_are_named(cifar_root, tmp_path, layout, name, change, message):
    original = next((cifar_root / layout).glob("cifar-10-*"))
    folder = tmp_path / original.name
    shutil.copytree(original, folder, copy_function=os.link)
    (folder / name).unlink()
    if change:
        (folder / name).write_bytes(change(original / name))
    with pytest.raises(UserError, match=message):
        read_cifar(CIFAR10, folder)
    with pytest.raises(UserError, match="cifar100 not found in .*--download"):
        read_cifar(DataConfig(data="cifar100"), tmp_path)


def test_recipes_take_the_standard_subset_whatever_the_seed(cifar_root):
    def drawn(subset: str, seed: int) -> str:
        recipe = replace(RECIPES["cifar10-lt-100"], root=str(cifar_root / "binary"), validation=0.0, seed=seed)
        return open_splits(replace(recipe, subset=subset)).train.digest

    assert RECIPES["cifar100-lt-200"].subset == "standard"
    assert drawn("standard", 0) == drawn("standard", 1)
    assert len({drawn("standard", 0), drawn("seeded", 0), drawn("seeded", 1)}) == 3


def test_digits_are_those_of_scikit_learn_and_their_test_split_is_fixed():
    splits = read_digits(DataConfig(data="digits"), Path())
    table, ours = load_digits(), []
    for images in (splits.train, splits.test):
        ours += zip(images.pixels[:, 0].tolist(), images.labels.tolist(), strict=True)
    theirs = zip((table.images * 255 / 16).round().tolist(), table.target.tolist(), strict=True)
    assert sorted(ours) == sorted(theirs)
    assert splits.test.class_counts.tolist() == [60] * 10
    pixels = splits.train.pixels.float() / 255
    (mean,), (std,) = SOURCES["digits"].statistics
    assert (float(pixels.mean()), float(pixels.std())) == pytest.approx((mean, std), abs=0.01)
    first, second = (open_splits(DataConfig(data="digits", profile="exp", imbalance=20, seed=s)) for s in (0, 1))
    assert torch.equal(first.test.pixels, second.test.pixels)
    assert first.train.class_counts.tolist() == second.train.class_counts.tolist()
    assert not torch.equal(first.train.pixels, second.train.pixels)
    in_train, held_out = ({p.numpy().tobytes() for p in part.pixels} for part in (first.train, first.validation))
    assert len(in_train & held_out) <= 1  # the digits hold a few equal images
