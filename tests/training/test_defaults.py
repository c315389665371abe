"""Settings chosen from the images, by the table in `training.defaults`, and numbers of the training loop."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from longtail.config import DataConfig
from longtail.errors import UserError
from longtail.recipes import RECIPES
from longtail.training import defaults
from longtail.training.defaults import for_minutes, look_at, recipe_for


def folder_of(tmp_path, size, mode="RGB", images=12):
    """Two classes of small images."""
    for label in range(2):
        (tmp_path / f"class{label}").mkdir(parents=True)
        for number in range(images // 2):
            Image.new(mode, size, 40 * label).save(tmp_path / f"class{label}" / f"{number}.png")
    return str(tmp_path)


def look_for(monkeypatch, images, side, grey=False, **settings):
    """What is found for so many images with this shorter side, without any file."""
    splits = SimpleNamespace(train=range(images))
    monkeypatch.setattr(defaults, "open_splits", lambda config: splits)
    monkeypatch.setattr(defaults, "_looks", lambda images: (side, grey))
    return look_at(DataConfig(data="folder", root="x"), **settings)


def chosen(monkeypatch, images, side, grey=False, **settings):
    return look_for(monkeypatch, images, side, grey, **settings).config


@pytest.mark.parametrize(
    ("side", "images", "backbone", "size"),
    [
        (12, 10, "digits", 8),
        (13, 10, "resnet8", 32),
        (48, 2_000, "resnet20", 32),
        (48, 20_000, "resnet32", 32),
        (49, 9_999, "resnet10", 64),
        (96, 10_000, "resnet18", 64),
        (160, 10, "resnet18", 128),
        (161, 20_000, "resnet34", 224),
        (500, 200_000, "resnet50", 224),
    ],
)
def test_network_and_size_follow_the_images(monkeypatch, side, images, backbone, size):
    config = chosen(monkeypatch, images, side)
    assert (config.backbone, config.image_size) == (backbone, size)


@pytest.mark.parametrize(
    ("images", "epochs", "batch_size", "lr", "warmup"),
    [
        (100, 90, 64, 0.05, 2),
        (2_000, 90, 128, 0.1, 16),
        (10_000, 40, 128, 0.1, 79),
        (100_000, 15, 128, 0.1, 782),
    ],
)
def test_length_and_rate_follow_the_number_of_images(monkeypatch, images, epochs, batch_size, lr, warmup):
    config = chosen(monkeypatch, images, 32)
    assert (config.epochs, config.batch_size, config.lr, config.warmup) == (epochs, batch_size, lr, warmup)


def test_what_is_given_replaces_what_is_chosen(monkeypatch):
    config = chosen(monkeypatch, 10_000, 32, image_size=96, epochs=3, batch_size=16)
    assert (config.backbone, config.image_size, config.epochs, config.batch_size) == ("resnet18", 96, 3, 16)
    monkeypatch.setattr(defaults, "backbone_of", lambda path: None)
    for images, epochs in ((10_000, 13), (100_000, 5)):  # a third, at least five
        pretrained = chosen(monkeypatch, images, 32, weights="w.pth")
        assert (pretrained.optimizer, pretrained.lr, pretrained.epochs) == ("adamw", 1e-3, epochs)
    given = chosen(monkeypatch, 10_000, 32, weights="w.pth", optimizer="sgd", weight_decay=0.1)
    assert (given.optimizer, given.lr, given.weight_decay, given.layer_decay) == ("sgd", 0.01, 0.1, 1.0)
    monkeypatch.setattr(defaults, "backbone_of", lambda path: "resnet50")
    assert chosen(monkeypatch, 10_000, 32, weights="w.pth").backbone == "resnet50"


def test_a_folder_is_looked_at(tmp_path):
    found = look_at(folder_of(tmp_path / "colour", (40, 30)))
    assert (found.side, found.grey, found.config.validation) == (30, False, 0.1)
    assert found.config.augment == ("crop", "flip")
    longer = replace(found.config, epochs=None, iterations=70, weights="w.pth")
    assert found.sentence(found.config).endswith(
        "; colour, about 30 pixels. Trained with --backbone resnet8 --image-size 32 --augment crop flip --epochs 90 "
        "--batch-size 64 --optimizer sgd --lr 0.05; give any of these options to change it"
    )
    assert "--backbone resnet8 --weights w.pth --image-size 32 --augment crop flip --iterations 70" in found.sentence(
        longer
    )
    grey = look_at(folder_of(tmp_path / "grey", (8, 20), "L"))
    assert (grey.side, grey.grey) == (8, True)
    assert "grey, about 8 pixels" in grey.sentence(grey.config)


def test_one_colour_image_among_grey_ones_makes_them_colour(tmp_path):
    root = folder_of(tmp_path / "mixed", (20, 20), "L")
    Image.new("RGB", (20, 20)).save(tmp_path / "mixed" / "class0" / "colour.png")
    assert not look_at(root, validation=0).grey


def test_a_list_of_images_that_are_not_there_says_how_to_find_them(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("".join(f"nowhere/{number}.png {number % 2}\n" for number in range(8)))
    with pytest.raises(
        UserError, match="none of the images was found, for example .*; give the folder .* --root FOLDER"
    ):
        look_at(str(path))


def test_a_recipe_is_taken_by_name():
    assert recipe_for("digits-lt") == RECIPES["digits-lt"]
    changed = recipe_for("cifar10-lt-100", root="data", lr=0.3)
    assert changed == replace(RECIPES["cifar10-lt-100"], root="data", lr=0.3)


@pytest.mark.parametrize(
    ("minutes", "free", "expected"),
    [
        (60, ("backbone", "image_size", "epochs"), ("resnet34", 224, 15)),  # 51 minutes for 15 epochs
        (20, ("backbone", "image_size", "epochs"), ("resnet34", 224, 8)),
        (10, ("backbone", "image_size", "epochs"), ("resnet18", 224, 8)),
        (2, ("backbone", "image_size", "epochs"), ("resnet18", 64, 11)),
        (0.01, ("backbone", "image_size", "epochs"), ("resnet8", 32, 1)),  # nothing fits
        (2, ("image_size", "epochs"), ("resnet34", 64, 5)),
        (2, ("backbone", "epochs"), ("resnet18", 224, 1)),
        (2, ("backbone", "image_size"), ("resnet10", 64, 15)),
    ],
)
def test_network_size_and_epochs_fit_into_the_time(monkeypatch, minutes, free, expected):
    usual = {"resnet34": 120, "resnet18": 60, "resnet10": 30, "resnet32": 90, "resnet20": 45, "resnet8": 15}
    found = look_for(monkeypatch, 30_000, 400)

    def seconds_of(config):
        return config.epochs * usual[config.backbone] * (config.image_size / 224) ** 1.5

    chosen = for_minutes(found, found.config, minutes, seconds_of, free)
    assert (chosen.backbone, chosen.image_size, chosen.epochs) == expected
    assert chosen.evaluate_every == max(round(chosen.epochs / 15), 1)
