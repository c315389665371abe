"""The first hour with a folder that has classes and no splits, and with names that are wrong."""

from pathlib import Path

import pytest
from PIL import Image

import longtail
from longtail.cli.main import main

COUNTS = {"zero": 30, "one": 12, "two": 1}  # one image: none is held out of this class


def run(capsys, *words) -> tuple[int, str]:
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    return code, " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("plain") / "photos"
    digits = longtail.data.open_splits("digits-lt").train
    for label, (name, count) in enumerate(COUNTS.items()):
        (root / name).mkdir(parents=True)
        for place in (digits.labels == label).nonzero().ravel()[:count].tolist():
            Image.fromarray(digits.pixels[place, 0].numpy()).save(root / name / f"{place}.png")
    return root


@pytest.fixture(scope="module")
def trained(photos) -> Path:
    words = ("train", photos, f"--out={photos.parent / 'run'}", "--epochs=1", "--workers=0", "--device=cpu", "--quiet")
    assert main([str(word) for word in words]) == 0
    return photos.parent / "run"


def test_without_test_images_the_command_that_training_names_works(capsys, trained):
    code, said = run(capsys, "evaluate", trained, "--device=cpu", "--workers=0")
    assert code == 0
    images = longtail.Run.open(trained).split_sizes["validation"]
    assert f"there are no test images: scored on {images} validation images" in said
    assert (trained / "metrics-validation.json").is_file()
    code, said = run(capsys, "evaluate", trained, "--split=test", "--device=cpu", "--workers=0")
    assert code == 2
    assert "photos has no test split here; train with --test-list FILE" in said


def test_classes_without_a_held_out_image_are_counted(trained):
    found = longtail.data.open_splits(longtail.Run.open(trained).config).summary()
    assert "validation (held out of the training images; no image of 1 class)" in found


def test_a_batch_larger_than_the_data_is_no_second_epoch(capsys, photos, tmp_path):
    words = ("train", photos, "--out", tmp_path / "run", "--epochs=1", "--batch-size=256", "--workers=0")
    code, said = run(capsys, *words)
    assert code == 0
    assert "epoch 1/1 loss" in said


def test_a_wrong_source_is_called_wrong(capsys, photos, tmp_path):
    image = sorted((photos / "one").iterdir())[0]
    for words, message in (
        (("calibrate", tmp_path / "nowhere"), "nowhere does not exist; name a run folder or a file of saved logits"),
        (("evaluate", tmp_path / "nowhere"), "nowhere is not a run folder: it does not exist"),
        (
            ("evaluate", image),
            f"{image.name} is not a run folder: it is a file. Saved logits are scored by `longtail diag",
        ),
        (("train", image, "--out", tmp_path / "run"), f"{image.name} is one image; name the folder that holds"),
    ):
        code, said = run(capsys, *words)
        assert code == 2
        assert message in said
    assert list(tmp_path.iterdir()) == []


def test_a_class_without_images_says_what_to_do(capsys, photos, tmp_path):
    (photos / "three").mkdir()
    try:
        code, said = run(capsys, "train", photos, f"--out={tmp_path / 'run'}")
    finally:
        (photos / "three").rmdir()
    assert code == 2
    assert "(three) of photos has no training image; add images, or remove the class" in said


def test_skipped_images_are_counted_and_the_first_is_named(capsys, photos, tmp_path):
    for place in range(2):
        (photos / "zero" / f"0000{place}.png").write_bytes(b"")
    try:
        words = ("train", photos, f"--out={tmp_path / 'run'}", "--epochs=1", "--workers=0", "--validation=0")
        code, said = run(capsys, *words, "--skip-broken")
    finally:
        for place in range(2):
            (photos / "zero" / f"0000{place}.png").unlink()
    assert code == 0
    total = sum(COUNTS.values()) + 2
    assert f"2 of {total} images cannot be read and are skipped; the first is {photos}/zero/00000.png" in said


def test_a_list_whose_images_lie_elsewhere_asks_for_the_folder(capsys, photos, tmp_path):
    lines = [f"{path.relative_to(photos)},{path.parent.name}" for path in sorted(photos.rglob("*.png"))]
    (tmp_path / "list.csv").write_text("path,label\n" + "\n".join(lines))
    words = ("train", tmp_path / "list.csv", f"--out={tmp_path / 'run'}", "--epochs=1", "--workers=0")
    code, said = run(capsys, *words)
    assert code == 2
    assert "none of the images was found, for example" in said
    assert "with --root FOLDER" in said
    assert run(capsys, *words, f"--root={photos}")[0] == 0
