"""The recipes say what the paper says."""

import pytest

import longtail
from longtail.errors import UserError
from longtail.recipes import RECIPES


@pytest.mark.parametrize("name", ["cifar10-lt-100", "cifar10-lt-200", "cifar100-lt-100", "cifar100-lt-200"])
def test_cifar(name):
    recipe = RECIPES[name]
    data, _, factor = name.split("-")
    assert (recipe.data, recipe.profile, recipe.imbalance) == (data, "exp", float(factor))
    assert (recipe.backbone, recipe.iterations, recipe.batch_size) == ("resnet32", 13_000, 512)
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (0.05, 0.9, 5e-4)
    assert recipe.augment == ("crop", "flip", "autoaugment", "cutout")


@pytest.mark.parametrize(
    ("name", "backbone", "epochs", "batch", "decay"),
    [
        ("imagenet-lt", "resnext50", 90, 256, 5e-4),
        ("places-lt", "resnet152", 30, 128, 5e-4),
        ("inaturalist18", "resnet50", 200, 256, 1e-4),
    ],
)
def test_photographs(name, backbone, epochs, batch, decay):
    recipe = RECIPES[name]
    assert (recipe.backbone, recipe.epochs, recipe.batch_size, recipe.weight_decay) == (backbone, epochs, batch, decay)
    assert (recipe.lr, recipe.profile, recipe.image_size) == (0.1, "none", 224)


def test_names_stand_for_recipes():
    by_name, by_recipe = longtail.data.open_splits("digits-lt"), longtail.data.open_splits(RECIPES["digits-lt"])
    assert by_name.train.pixels.equal(by_recipe.train.pixels)


def test_a_wrong_name_is_corrected(tmp_path):
    with pytest.raises(UserError, match="'digits' is not a file, folder or recipe .did you mean 'digits-lt'"):
        longtail.train("digits", tmp_path / "run")
    with pytest.raises(UserError, match="'cifar' is not a file, folder or recipe; recipes: digits-lt, "):
        longtail.compare("cifar", ["softmax"], tmp_path / "compare")
    with pytest.raises(UserError, match="'digits-l' is not a file, folder or recipe .did you mean 'digits-lt'"):
        longtail.data.open_splits("digits-l")
    assert not list(tmp_path.iterdir())
