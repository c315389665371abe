"""Images decoded once: the same pixels as decoded each time, found again, decoded anew once a file changes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail.config import DataConfig, TrainConfig
from longtail.data import cache as decoded
from longtail.data.augment import build_transform
from longtail.data.cache import StoredImages, resident
from longtail.data.images import DecodedImages, FileImages
from longtail.data.listings import read_folder
from longtail.data.loading import Sampler, load
from longtail.data.splits import open_splits
from longtail.errors import UserError
from longtail.files.tensors import read_tensors

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Thirty images of two classes, sizes and modes differ; a cache folder of their own."""
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(30):
        pixels = rng.integers(0, 256, (20 + number, 45 - number, 3), dtype=np.uint8)
        path = tmp_path / "photos" / ("ant" if number % 3 else "bee") / f"{number:02d}.{'png' if number % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).convert("L" if number % 5 == 0 else "RGB").save(path)
    return tmp_path / "photos"


def folder_of(photos, **settings):
    return read_folder(photos, DataConfig(**settings)).images


def transform_of(*names):
    return build_transform(names, (0.5,) * 3, (0.25,) * 3, image_size=16, seed=1)


CLEAN = build_transform(("resized-crop",), (0.5,) * 3, (0.25,) * 3, image_size=16)


def files(folder: Path):
    return sorted((folder.parent / "cache" / "decoded").glob("*.safetensors"))


def batches(images, transform, workers=0):
    sampler = Sampler(images.labels.numpy(), seed=1)
    plan = [sampler.batch(step, 7) for step in range(9)]
    found = list(load(images, transform, plan, workers=workers))
    return torch.cat([batch.images for batch in found]), torch.cat([batch.indices for batch in found])


@pytest.mark.parametrize(("names", "workers"), [(("crop", "flip"), 0), (("resized-crop", "flip", "jitter"), 2)])
def test_pixels_are_those_of_decoding_each_time(photos, names, workers, monkeypatch):
    images, transform = folder_of(photos), transform_of(*names)
    stored = resident(images, transform, CPU, cache_gb=1, workers=workers)
    assert isinstance(stored, StoredImages)
    assert stored.digest == images.digest
    expected, indices = batches(images, transform)
    monkeypatch.setattr(DecodedImages, "open", None)  # from now on nothing is decoded
    pixels, found = batches(stored, transform, workers)
    assert torch.equal(pixels, expected)
    assert torch.equal(found, indices)


def test_splits_of_one_set_share_a_file_and_it_is_found_again(photos, monkeypatch):
    config = DataConfig(data="folder", root=str(photos), validation=0.2)
    transform = transform_of("crop")
    for seed in (0, 1):
        splits = open_splits(replace(config, seed=seed))
        for images in (splits.train, splits.validation):
            expected, _ = batches(images, transform)
            stored = resident(images, transform, CPU, cache_gb=1)
            assert torch.equal(batches(stored, transform)[0], expected)
            assert torch.equal(batches(stored.subset(np.array([3, 1])), transform)[0][:2], batches(
                images.subset(np.array([3, 1])), transform)[0][:2])  # fmt: skip
    assert len(files(photos)) == 1


def test_held_out_images_are_cut_from_the_whole_pictures_that_training_has_stored(photos):
    splits = open_splits(DataConfig(data="folder", root=str(photos), validation=0.2))
    resident(splits.train, transform_of("resized-crop"), CPU, cache_gb=1)
    stored = resident(splits.validation, CLEAN, CPU, cache_gb=1)
    assert len(files(photos)) == 1
    assert torch.equal(batches(stored, CLEAN)[0], batches(splits.validation, CLEAN)[0])
    (photos.parent / "cache" / "decoded" / files(photos)[0].name).unlink()
    alone = resident(splits.validation, CLEAN, CPU, cache_gb=1)  # a small part is not worth decoding everything
    assert len(decoded._open(alone.file)["heights"]) == len(splits.validation)


@pytest.mark.parametrize("same_times", [False, True])
def test_a_changed_file_is_decoded_again(photos, same_times):
    path, transform = photos / "ant" / "01.png", transform_of("crop")
    before = batches(resident(folder_of(photos), transform, CPU, cache_gb=1), transform)[0]
    known = path.stat()
    picture = Image.open(path)
    pixels = 255 - np.asarray(picture)
    Image.fromarray(pixels).save(path)
    with path.open("ab") as file:
        file.truncate(known.st_size)  # the same size
    if same_times:
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    try:
        expected = batches(folder_of(photos), transform)[0]
    except UserError:  # cut too short to be read: then it must be said, not answered from the cache
        with pytest.raises(UserError, match="01.png cannot be read"):
            resident(folder_of(photos), transform, CPU, cache_gb=1)
        return
    after = batches(resident(folder_of(photos), transform, CPU, cache_gb=1), transform)[0]
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


def test_what_does_not_fit_is_left_where_it_is(photos, monkeypatch):
    images, transform = folder_of(photos), transform_of("resized-crop")
    assert resident(images, transform, CPU, cache_gb=0) is images
    gigabytes = 30.5 * 16 * 16 * 3 / 1e9
    assert resident(images, transform, CPU, cache_gb=gigabytes) is images  # whole pictures are larger
    assert resident(images, transform_of("crop"), CPU, cache_gb=gigabytes * 0.95) is images
    assert files(photos) == []
    assert isinstance(resident(images, transform_of("crop"), CPU, cache_gb=gigabytes), StoredImages)
    (photos.parent / "file").write_text("")
    monkeypatch.setenv("LONGTAIL_CACHE", str(photos.parent / "file"))  # a folder that cannot be written
    assert resident(images, transform_of("crop"), CPU, cache_gb=1) is images


@pytest.mark.parametrize("names", [("crop",), ("resized-crop",)])
def test_broken_images_are_named_at_the_start_or_skipped(photos, names):
    transform = transform_of(*names)
    (photos / "ant" / "07.png").write_bytes(b"no picture")
    for workers in (0, 2):
        with pytest.raises(UserError, match=r"07.png cannot be read: it is not an image .*--skip-broken") as error:
            resident(folder_of(photos), transform, CPU, cache_gb=1, workers=workers)
        assert "Traceback" not in str(error.value)
    assert files(photos) == []  # nothing half-written stays
    skipping = folder_of(photos, skip_broken=True)
    stored = resident(skipping, transform, CPU, cache_gb=1)
    assert torch.equal(batches(stored, transform)[0], batches(skipping, transform)[0])
    with pytest.raises(UserError, match=r"07.png cannot be read"):  # who does not skip is still told
        resident(folder_of(photos), transform, CPU, cache_gb=1)
    for number in range(7):
        (photos / "ant" / f"0{number}.png").write_bytes(b"no picture")
    message = r"8 of \d+ images are missing or cannot be read: \S*00.png, \S*01.png, .*04.png, … .--skip-broken"
    with pytest.raises(UserError, match=message):
        resident(folder_of(photos), transform, CPU, cache_gb=1)


def test_missing_files_are_named_before_training_also_without_the_cache(photos):
    images, skipping = folder_of(photos), folder_of(photos, skip_broken=True)
    (photos / "ant" / "07.png").unlink()
    with pytest.raises(UserError, match=r"07.png is missing"):
        resident(images, transform_of("crop"), CPU, cache_gb=0)
    assert resident(skipping, transform_of("crop"), CPU, cache_gb=0) is skipping


def test_a_damaged_file_is_made_again(photos):
    images, transform = folder_of(photos), transform_of("crop")
    expected, _ = batches(resident(images, transform, CPU, cache_gb=1), transform)
    (file,) = files(photos)
    file.write_bytes(file.read_bytes()[:40])
    decoded._open.cache_clear()
    assert torch.equal(batches(resident(images, transform, CPU, cache_gb=1), transform)[0], expected)


def test_the_least_recently_used_files_go_first(photos, monkeypatch):
    def stored(side):
        transform = build_transform((), (0.5,), (0.5,), image_size=side)
        return resident(folder_of(photos), transform, CPU, cache_gb=1).file

    kept = [stored(16), stored(17)]
    monkeypatch.setattr(decoded, "MAX_CACHE_BYTES", 3 * kept[0].stat().st_size)
    os.utime(kept[0], (1, 1))
    newest = stored(18)
    assert files(photos) == sorted([kept[1], newest])


TWO = """
import sys
import torch
from longtail.config import DataConfig
from longtail.data.augment import build_transform
from longtail.data.cache import resident
from longtail.data.listings import read_folder
from pathlib import Path
images = read_folder(Path(sys.argv[1]), DataConfig()).images
transform = build_transform((), (0.5,), (0.5,), image_size=16)
stored = resident(images, transform, torch.device("cpu"), cache_gb=1)
print(stored.read(images.labels.numpy() * 0, transform.decode, None)[0].sum())
"""


def test_two_processes_at_once_make_one_file(photos):
    both = [
        subprocess.Popen([sys.executable, "-c", TWO, str(photos)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in both]
    assert said[0] == said[1] != ""
    assert len(files(photos)) == 1
    assert not list((photos.parent / "cache" / "decoded").glob("*.part"))


def test_training_is_the_same_with_and_without_and_decodes_once(photos, tmp_path, monkeypatch):
    config = TrainConfig(
        data="folder", root=str(photos), backbone="resnet8", image_size=16, augment=("crop", "flip"), epochs=3,
        batch_size=8, workers=0, device="cpu",
    )  # fmt: skip
    calls = []
    opening = FileImages.open
    monkeypatch.setattr(FileImages, "open", lambda self, index: calls.append(index) or opening(self, index))
    longtail.train(replace(config, cache_gb=0), tmp_path / "without", progress=False)
    without = len(calls)
    calls.clear()
    longtail.train(config, tmp_path / "with", progress=False)
    assert without > 3 * 30
    assert len(calls) == 30
    weights = [read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("with", "without")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    calls.clear()
    longtail.train(replace(config, method="balanced-softmax"), tmp_path / "again", progress=False)
    assert calls == []
