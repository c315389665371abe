import numpy as np
import pytest
import torch
from PIL import Image

from longtail.config import DataConfig
from longtail.data.augment import clean_transform, training_transform
from longtail.data.list_files import read_folder, read_list
from longtail.data.loading import in_order, load
from longtail.data.samplers import Sampler
from longtail.data.splits import open_splits
from longtail.errors import UserError


@pytest.fixture
def photos(tmp_path):
    """Twelve pictures of three classes and several sizes and modes, as folders and as a list."""
    rng = np.random.default_rng(0)
    lines = []
    for split, per_class in (("train", 4), ("test", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                size = (40 + 5 * number, 30 + 7 * label)
                picture = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
                if number == 1:
                    picture = picture.convert("L")
                path = folder / f"picture {number}.{'jpg' if number else 'png'}"
                picture.save(path)
                if split == "train":
                    lines.append(f"{path.relative_to(tmp_path)} {label}")
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n\n")
    return tmp_path


CLEAN = clean_transform(["resized-crop"], (0.5,) * 3, (0.25,) * 3, image_size=24)


def pixels_of(images, transform=CLEAN, *, workers=0, plan=None):
    plan = plan or in_order(len(images), 5)
    batches = list(load(images, transform, plan, workers=workers))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def test_list_and_folder_hold_the_same_images(photos):
    listed, folder = read_list(photos / "list.txt", photos), read_folder(photos / "train")
    assert folder.class_names == ("ant", "bee", "cat")
    assert listed.class_counts.tolist() == folder.class_counts.tolist() == [4, 4, 4]
    (first, labels), (second, _) = pixels_of(listed), pixels_of(folder)
    assert first.shape == (12, 3, 24, 24)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    # The folder lists its files by name, the list as they were written.
    assert sorted(first.sum((1, 2, 3)).tolist()) == sorted(second.sum((1, 2, 3)).tolist())


def test_worker_processes_give_the_same_pixels(photos):
    images = read_folder(photos / "train")
    transform = training_transform(["resized-crop", "flip", "jitter"], (0.5,) * 3, (0.25,) * 3, image_size=24, seed=4)
    sampler = Sampler(images.labels.numpy(), seed=1)
    plan = [sampler.batch(step, 6) for step in range(4)]
    alone, labels = pixels_of(images, transform, plan=plan)
    shared, _ = pixels_of(images, transform, plan=plan, workers=2)
    assert torch.equal(alone, shared)
    assert torch.bincount(labels).tolist() == [8, 8, 8]
    one_by_one, _ = pixels_of(images, transform, plan=[sampler.draws(draw, 1) for draw in range(24)])
    torch.testing.assert_close(one_by_one, alone)


def test_broken_and_missing_images_are_named_or_skipped(photos):
    (photos / "train" / "bee" / "picture 2.jpg").write_bytes(b"not a picture")
    (photos / "train" / "cat" / "picture 3.jpg").unlink()
    listed = read_list(photos / "list.txt", photos)
    with pytest.raises(UserError, match=r"bee/picture 2.jpg cannot be read.*--skip-broken"):
        pixels_of(listed)
    with pytest.raises(UserError, match=r"cat/picture 3.jpg is missing"):
        pixels_of(listed.subset(np.array([11])))
    skipping = read_list(photos / "list.txt", photos, skip_broken=True)
    images, labels = pixels_of(skipping)
    assert len(images) == 10
    assert torch.bincount(labels).tolist() == [4, 3, 3]
    with pytest.raises(UserError, match="none of the 1 images"):
        pixels_of(skipping.subset(np.array([11])))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.jpg\n", "line 1: expected a path and the number of its class"),
        ("a.jpg 0\nb.jpg x\n", "line 2: expected a path and the number of its class .*class names .* CSV"),
        ("a.jpg 0\nb.jpg -1\n", "line 2: label -1 is outside"),
        ("a.jpg 7\n", r"line 1: label 7 is outside 0\.\.4"),
        ("\n", "is empty"),
    ],
)
def test_bad_list_files_are_named_with_their_line(tmp_path, content, message):
    (tmp_path / "list.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        read_list(tmp_path / "list.txt", tmp_path, num_classes=5)


def test_missing_files_and_folders_are_named(tmp_path, photos):
    with pytest.raises(UserError, match="list file .* does not exist"):
        read_list(tmp_path / "none.txt", tmp_path)
    with pytest.raises(UserError, match="root folder .* does not exist"):
        read_list(photos / "list.txt", tmp_path / "none")
    with pytest.raises(UserError, match="no folder per class"):
        read_folder(photos / "train" / "ant")
    (photos / "test" / "dog").mkdir()
    with pytest.raises(UserError, match="classes the training set does not: dog"):
        open_splits(DataConfig(data="folder", root=str(photos)))


def test_open_splits_of_folders_and_lists(photos):
    folder = open_splits(DataConfig(data="folder", root=str(photos), validation=0.25))
    assert [len(s) for s in (folder.train, folder.validation, folder.test)] == [9, 3, 6]
    listed = open_splits(DataConfig(data="lists", root=str(photos), train_list=str(photos / "list.txt"), validation=0))
    assert len(listed.train) == 12
    with pytest.raises(UserError, match="no test split here; train with --test-list"):
        listed.split("test")
    with pytest.raises(UserError, match="needs --train-list"):
        open_splits(DataConfig(data="lists", root=str(photos)))


def test_a_class_without_images_is_named(photos):
    lines = (photos / "list.txt").read_text().replace(" 1\n", " 3\n")
    (photos / "list.txt").write_text(lines)
    with pytest.raises(UserError, match="class 1 of list.txt has no training image"):
        open_splits(DataConfig(data="lists", root=str(photos), train_list=str(photos / "list.txt"), validation=0))
