"""The paper's training recipes by name, and a small one on embedded digits.

Source: Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022, section 4.1;
AutoAugment, Cutout, colour jitter and the warm-up are those of the released code.
"""

from __future__ import annotations

from longtail.config import TrainConfig
from longtail.errors import choose

CIFAR_AUGMENT = ("crop", "flip", "autoaugment", "cutout")
PICTURES_AUGMENT = ("resized-crop", "flip", "jitter")


def _cifar(data: str, imbalance: float) -> TrainConfig:
    return TrainConfig(
        data=data,
        profile="exp",
        imbalance=imbalance,
        backbone="resnet32",
        augment=CIFAR_AUGMENT,
        iterations=13_000,
        batch_size=512,
        lr=0.05,
        warmup=800,
    )


RECIPES: dict[str, TrainConfig] = {
    "digits-lt": TrainConfig(
        data="digits",
        profile="exp",
        imbalance=30,
        backbone="digits",
        augment=("small-crop",),
        epochs=30,
        batch_size=64,
        lr=0.1,
        warmup=20,
        evaluate_every=5,
        checkpoint_every=5,
    ),
    "cifar10-lt-100": _cifar("cifar10", 100),
    "cifar10-lt-200": _cifar("cifar10", 200),
    "cifar100-lt-100": _cifar("cifar100", 100),
    "cifar100-lt-200": _cifar("cifar100", 200),
    "imagenet-lt": TrainConfig(
        data="imagenet-lt",
        backbone="resnext50",
        image_size=224,
        augment=PICTURES_AUGMENT,
        epochs=90,
        batch_size=256,
        lr=0.1,
    ),
    "places-lt": TrainConfig(
        data="places-lt",
        backbone="resnet152",
        image_size=224,
        augment=PICTURES_AUGMENT,
        epochs=30,
        batch_size=128,
        lr=0.1,
    ),
    "inaturalist18": TrainConfig(
        data="inaturalist18",
        validation=0.05,
        backbone="resnet50",
        image_size=224,
        augment=("resized-crop", "flip"),
        epochs=200,
        batch_size=256,
        lr=0.1,
        weight_decay=1e-4,
    ),
}


def find_recipe(config: TrainConfig | str) -> TrainConfig:
    """A configuration itself, or the recipe of that name."""
    return RECIPES[choose("recipe", config, RECIPES)] if isinstance(config, str) else config
