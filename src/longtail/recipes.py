"""Training recipes by name, the settings of each method's authors, and stage two, per data set.

| recipe | what |
|---|---|
| `digits-lt` | the digits of scikit-learn; trains in seconds |
| `cifar10-lt-F`, `cifar100-lt-F` | the paper's CIFAR runs; F is the imbalance factor 10, 50, 100 or 200 |
| `…-release` | the same with the learning rate of the released code: 0.05 → 0.1 in 800 steps, then a cosine from 0.1 |
| `imagenet-lt`, `places-lt`, `inaturalist18` | the paper's runs on photographs |

Sources: Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022, section 4.1. AutoAugment,
Cutout and colour jitter are those of the released code; its bicubic shear, its rotation by a positive angle only and
its normalisation of CIFAR by ImageNet's statistics are not ours. The papers and released code of the other methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from longtail.config import TrainConfig

CIFAR_AUGMENT = ("crop", "flip", "autoaugment", "cutout")
PICTURES_AUGMENT = ("resized-crop", "flip", "jitter")


def _cifar(data: str, imbalance: float) -> TrainConfig:
    return TrainConfig(
        data=data,
        profile="exp",
        imbalance=imbalance,
        subset="standard",
        backbone="resnet32",
        augment=CIFAR_AUGMENT,
        iterations=13_000,
        batch_size=512,
        lr=0.05,
    )


def _photographs(data: str, backbone: str, epochs: int, batch_size: int, **more: Any) -> TrainConfig:
    settings = {"image_size": 224, "augment": PICTURES_AUGMENT, "lr": 0.1, **more}
    return TrainConfig(data=data, backbone=backbone, epochs=epochs, batch_size=batch_size, **settings)


_CIFARS = {
    f"{data}-lt-{factor}": _cifar(data, factor) for data in ("cifar10", "cifar100") for factor in (10, 50, 100, 200)
}

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
    **_CIFARS,
    **{
        f"{name}-release": replace(config, lr=0.1, warmup=800, warmup_from=0.05)
        for name, config in _CIFARS.items()
        if config.imbalance >= 100
    },
    "imagenet-lt": _photographs("imagenet-lt", "resnext50", 90, 256),
    "places-lt": _photographs("places-lt", "resnet152", 30, 128),
    "inaturalist18": _photographs(
        "inaturalist18", "resnet50", 200, 256, validation=0.05, augment=("resized-crop", "flip"), weight_decay=1e-4
    ),
}

# Data set → method → the settings its authors use there, where they are not the method's defaults. Length, batch,
# rate and weight decay stay those of the recipe: methods are compared at equal steps.
AUTHORS_SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "cifar10": {"causal-norm": {"alpha": "1"}, "equalization": {"threshold": "0.005"}, "focal": {"gamma": "1"}},
    "cifar100": {
        "causal-norm": {"alpha": "1.5"},
        "equalization": {"threshold": "0.005"},
        "focal": {"gamma": "1"},
        "lade": {"remine_lambda": "0.01"},
    },
    "imagenet-lt": {
        "causal-norm": {"alpha": "3", "memory": "slowing"},
        "lade": {"alpha": "0.05", "remine_lambda": "0.5"},
        "oltr": {"layer": "512"},
    },
    "places-lt": {
        "causal-norm": {"alpha": "3", "memory": "slowing"},
        "lade": {"alpha": "0.005"},
        "oltr": {"layer": "512", "first_rate": "0.01", "second_rate": "0"},
    },
    "inaturalist18": {
        "causal-norm": {"alpha": "3", "memory": "slowing"},
        "lade": {"alpha": "0.05", "remine_lambda": "0.5"},
    },
}


def with_authors_settings(config: TrainConfig) -> TrainConfig:
    """The configuration with the settings that the method's authors use on its data; given ones stay."""
    settings = AUTHORS_SETTINGS.get(config.data, {}).get(config.method, {})
    return replace(config, options={**settings, **config.options})


@dataclass(frozen=True)
class StageTwo:
    """How stage two is trained where it is trained in steps (`solver="sgd"`), and its weight decay."""

    batch_size: int = 512  # samples per step
    weight_decay: float = 5e-4
    epochs: int | None = None  # passes over the training images; None for `iterations`
    iterations: int = 2000

    def steps(self, train_images: int) -> int:
        """Steps for so many training images.

        >>> StageTwo(256, epochs=10).steps(115_846)
        4526
        """
        return self.iterations if self.epochs is None else math.ceil(self.epochs * train_images / self.batch_size)


# Data set → stage two as in the paper; on other data as on CIFAR.
STAGE_TWO: dict[str, StageTwo] = {
    "imagenet-lt": StageTwo(256, epochs=10),
    "places-lt": StageTwo(128, epochs=10),
    "inaturalist18": StageTwo(256, 1e-4, epochs=30),
}
