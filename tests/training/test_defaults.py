"""Settings chosen from the images, and for a length in minutes."""

from dataclasses import replace

import pytest
from PIL import Image

from longtail.errors import UserError
from longtail.recipes import RECIPES
from longtail.training.defaults import for_minutes, recipe_for, suggest_settings


def folder_of(tmp_path, size, mode="RGB", images=12):
    """Two classes of small images."""
    for number in range(images):
        (tmp_path / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, 40 * (number % 2)).save(tmp_path / f"class{number % 2}" / f"{number}.png")
    return str(tmp_path)


def test_settings_follow_the_images_and_options_replace_them(tmp_path):
    photos = folder_of(tmp_path / "colour", (40, 30))
    found = suggest_settings(photos)
    assert (found.side, found.grey, found.config.validation) == (30, False, 0.1)
    assert (found.config.backbone, found.config.image_size, found.config.augment) == ("resnet8", 32, ("crop", "flip"))
    assert found.sentence(found.config).endswith(
        "; colour, about 30 pixels. Trained with --backbone resnet8 --image-size 32 --augment crop flip --epochs 90 "
        "--batch-size 64 --optimizer sgd --lr 0.05; give any of these options to change it"
    )
    longer = replace(found.config, epochs=None, iterations=70, weights="w.pth")
    assert "--backbone resnet8 --weights w.pth --image-size 32 --augment crop flip --iterations 70" in found.sentence(
        longer
    )
    given = recipe_for(photos, image_size=96, epochs=3, batch_size=16)
    assert (given.backbone, given.image_size, given.epochs, given.batch_size) == ("resnet10", 96, 3, 16)
    pretrained = recipe_for(photos, backbone="resnet18", weights="w.pth")
    assert (pretrained.optimizer, pretrained.epochs) == ("adamw", found.config.epochs / 3)
    sgd = recipe_for(photos, backbone="resnet18", weights="w.pth", optimizer="sgd", weight_decay=0.1)
    assert (sgd.optimizer, sgd.weight_decay, sgd.layer_decay) == ("sgd", 0.1, 1.0)
    assert sgd.lr < given.lr
    grey = suggest_settings(folder_of(tmp_path / "grey", (8, 20), "L"))
    assert (grey.side, grey.grey, grey.config.augment) == (8, True, ("small-crop",))
    Image.new("RGB", (20, 20)).save(tmp_path / "grey" / "class0" / "colour.png")
    assert not suggest_settings(str(tmp_path / "grey"), validation=0).grey


def test_a_list_of_images_that_are_not_there_says_how_to_find_them(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("".join(f"nowhere/{number}.png {number % 2}\n" for number in range(8)))
    with pytest.raises(
        UserError, match="none of the images was found, for example .*; give the folder .* --root FOLDER"
    ):
        suggest_settings(str(path))


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
def test_network_size_and_epochs_fit_into_the_time(tmp_path, minutes, free, expected):
    usual = {"resnet34": 120, "resnet18": 60, "resnet10": 30, "resnet32": 90, "resnet20": 45, "resnet8": 15}
    found = suggest_settings(folder_of(tmp_path, (9, 9), images=2), validation=0)
    found = replace(found, config=replace(found.config, backbone="resnet34", image_size=224, epochs=15.0))

    tried = []

    def seconds_of(config):
        tried.append(config.backbone)
        return config.epochs * usual[config.backbone] * (config.image_size / 224) ** 1.5

    chosen = for_minutes(found, found.config, minutes, seconds_of, free)
    assert (chosen.backbone, chosen.image_size, chosen.epochs) == expected
    assert minutes >= 1 or tried == ["resnet34", "resnet32", "resnet8"]  # no time is lost on trials of what cannot fit
    assert chosen.evaluate_every == max(round(chosen.epochs / 15), 1)
