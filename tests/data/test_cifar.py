import os
import shutil
from dataclasses import replace

import pytest
import torch

from longtail.config import DataConfig
from longtail.data.cifar import read_cifar
from longtail.data.splits import open_splits
from longtail.errors import UserError
from longtail.recipes import RECIPES


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_both_layouts_hold_the_same_images(cifar_root, name):
    python, binary = (read_cifar(name, cifar_root / layout) for layout in ("python", "binary"))
    classes = 10 if name == "cifar10" else 100
    for ours, theirs, size in zip(python, binary, (50_000, 10_000), strict=True):
        assert ours.pixels.shape == (size, 3, 32, 32)
        assert ours.pixels.dtype == torch.uint8
        assert ours.class_counts.tolist() == [size // classes] * classes
        assert torch.equal(ours.pixels, theirs.pixels)
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.class_names == theirs.class_names
    expected = "airplane" if name == "cifar10" else "apple"
    assert python[0].class_names[0] == expected


def test_the_folder_itself_is_found_too(cifar_root):
    train, _ = read_cifar("cifar10", cifar_root / "binary" / "cifar-10-batches-bin")
    assert len(train) == 50_000


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


@pytest.fixture
def one_layout(cifar_root, tmp_path):
    """A copy that may be damaged; the files are links until then."""

    def copy(layout: str):
        folder = next((cifar_root / layout).glob("cifar-10-*"))
        shutil.copytree(folder, tmp_path / folder.name, copy_function=os.link)
        return tmp_path / folder.name

    return copy


def rewrite(path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def test_truncated_binary_file_is_named(one_layout):
    path = one_layout("binary") / "data_batch_3.bin"
    rewrite(path, path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"data_batch_3.bin is cut short"):
        read_cifar("cifar10", path.parent)


def test_file_cut_at_a_row_is_noticed(one_layout):
    path = one_layout("binary") / "data_batch_3.bin"
    rewrite(path, path.read_bytes()[: 3073 * 9000])
    with pytest.raises(UserError, match="49000 images where 50000"):
        read_cifar("cifar10", path.parent)


def test_truncated_python_file_is_named(one_layout):
    path = one_layout("python") / "test_batch"
    rewrite(path, path.read_bytes()[:100_000])
    with pytest.raises(UserError, match="test_batch is not a CIFAR file, or is cut short"):
        read_cifar("cifar10", path.parent)


def test_label_out_of_range_is_named(one_layout):
    path = one_layout("binary") / "data_batch_1.bin"
    rewrite(path, b"\x17" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"label 23, outside 0\.\.9"):
        read_cifar("cifar10", path.parent)


def test_missing_file_and_wrong_folder_are_named(one_layout, tmp_path):
    folder = one_layout("binary")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match="data_batch_4.bin is missing"):
        read_cifar("cifar10", folder)
    with pytest.raises(UserError, match="cifar100 not found in .*--download"):
        read_cifar("cifar100", tmp_path)


def test_recipes_take_the_standard_subset_whatever_the_seed(cifar_root):
    def drawn(subset: str, seed: int) -> str:
        recipe = replace(RECIPES["cifar10-lt-100"], root=str(cifar_root / "binary"), validation=0.0, seed=seed)
        return open_splits(replace(recipe, subset=subset)).train.digest

    assert RECIPES["cifar100-lt-200"].subset == "standard"
    assert drawn("standard", 0) == drawn("standard", 1)
    assert len({drawn("standard", 0), drawn("seeded", 0), drawn("seeded", 1)}) == 3
