"""Default settings chosen from the images: `longtail train photos --out runs/photos` needs no other options.

A pretrained network is trained with AdamW, for a third of the epochs, at its own image size; a network of timm or
Hugging Face with random weights with AdamW, and a ResNet from scratch with SGD. See `with_default_optimizer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.backbones.library import input_settings, library_of
from longtail.backbones.weights import backbone_of
from longtail.config import DataConfig, TrainConfig, from_dict
from longtail.data.images import DecodedImages, FileImages, Images, MemoryImages
from longtail.data.splits import SOURCES, Splits, find_data, open_splits
from longtail.errors import UserError
from longtail.recipes import RECIPES
from longtail.runs.network import settled

VALIDATION = 0.1
EVALUATIONS = 15  # lines about validation images that a training of the chosen length prints
SAMPLED_HEADERS = 200  # images whose headers are read
# Largest median side, side that images are resized to, and networks: (minimum number of images, name).
SIZES: tuple[tuple[float, int, tuple[tuple[int, str], ...]], ...] = (
    (12, 8, ((0, "digits"),)),
    (48, 32, ((0, "resnet8"), (2_000, "resnet20"), (20_000, "resnet32"))),
    (96, 64, ((0, "resnet10"), (10_000, "resnet18"))),
    (160, 128, ((0, "resnet18"),)),
    (float("inf"), 224, ((0, "resnet18"), (20_000, "resnet34"), (200_000, "resnet50"))),
)
# What is trained of a pretrained network → its settings with AdamW.
FINE_TUNING: dict[str, dict[str, float]] = {
    "all": {"lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.75},
    "last": {"lr": 1e-3, "weight_decay": 0.05},
    "lora": {"lr": 1e-3, "weight_decay": 0.01},
}
FROM_SCRATCH: dict[str, float] = {"lr": 1e-3, "weight_decay": 0.05}  # a network of timm or Hugging Face, with AdamW
SGD_LR = 0.01  # for a pretrained network
FEWEST_EPOCHS = 1 / 3  # of the usual number: with fewer, a smaller network is trained better
STEPS_SHARE = 0.85  # of the time for training; evaluations take the rest
CHEAPER = 30.0  # a smaller network is at most this many times cheaper per pixel than the one that was tried before
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


@dataclass(frozen=True)
class Suggestion:
    """Images, and the settings suggested for them."""

    splits: Splits
    config: TrainConfig
    side: int
    """Median of the shorter sides, of some of the images."""
    grey: bool

    def sentence(self, config: TrainConfig) -> str:
        """One sentence: the images, and how they are trained on; `config` includes all options."""
        colour = "grey" if self.grey else "colour"
        images = f"{self.splits.summary()}; {colour}, about {self.side} pixels"
        if config.train == "head":
            return images
        augment = " ".join(("--augment", *config.augment))
        length = f"--epochs {config.epochs:g}" if config.epochs else f"--iterations {config.iterations}"
        start = f" --weights {config.weights}" if config.weights else ""
        return (
            f"{images}. Trained with --backbone {config.backbone}{start} --image-size {config.image_size} {augment} "
            f"{length} --batch-size {config.batch_size} --optimizer {config.optimizer} --lr {config.lr:g}; "
            "give any of these options to change it"
        )


def recipe_for(data: str | DataConfig, *, root: str | None = None, **settings: Any) -> TrainConfig:
    """The recipe of that name, or settings chosen from the images at a path; 10 % of the images are held out.

    Args:
        data: the name of a recipe, an image folder, or a list, CSV or Parquet file of images.
        root: folder of the data set (recipes), or folder that the paths in a file are relative to.
        settings: fields of `TrainConfig` that replace the chosen ones.
    """
    if isinstance(data, str) and data in RECIPES:
        return changed_recipe(data, {"root": root, **settings})
    return suggest_settings(data, root=root, **settings).config


def changed_recipe(name: str, settings: dict[str, Any]) -> TrainConfig:
    """A recipe with other settings; with another network or training than from scratch, their optimiser too."""
    config = from_dict(settings, RECIPES[name])
    if library_of(config.backbone) is None and config.train == "all":
        return config
    return settled(with_default_optimizer(config, settings))


def with_default_optimizer(config: TrainConfig, given: Collection[str] = ()) -> TrainConfig:
    """The configuration with the optimiser and learning rate for what is trained of its network.

    Settings whose names are `given` stay, and so does everything where a network of this library starts at random.
    """
    library, trained = library_of(config.backbone), config.train.partition(":")[0]
    pretrained = config.weights or (library and config.pretrained)
    if trained == "head" or not (pretrained or library):
        return config
    chosen: dict[str, Any] = {"optimizer": "adamw", **(FINE_TUNING[trained] if pretrained else FROM_SCRATCH)}
    if "optimizer" in given and config.optimizer == "sgd":
        chosen = {"lr": SGD_LR} if pretrained else {}
    return replace(config, **{name: value for name, value in chosen.items() if name not in given})


def suggest_settings(data: str | DataConfig, *, root: str | None = None, **settings: Any) -> Suggestion:
    """Inspect the images at a path, and choose settings."""
    where = replace(find_data(data, root), validation=VALIDATION) if isinstance(data, str) else data
    of_data = {name: value for name, value in settings.items() if name in DataConfig.__dataclass_fields__}
    splits = open_splits(replace(where, **of_data))
    side, grey = _side_and_colour(splits.train)
    network = settings.get("backbone") or ""
    fixed = input_settings(network) if library_of(network) else {}  # by the network
    size = settings.get("image_size") or fixed.get("image_size") or SOURCES[where.data].side
    row = next(row for row in SIZES if (size or side) <= row[0])
    size, images = size or row[1], len(splits.train)
    backbone = [name for least, name in row[2] if images >= least][-1]
    chosen: dict[str, Any] = {
        "backbone": backbone,
        **fixed,
        "image_size": None if isinstance(splits.train, MemoryImages) and not fixed else size,
        "augment": _augment(size, grey=grey),
        "epochs": float(np.clip(round(400_000 / images), 15, 90)),
        "batch_size": 64 if images < 2_000 else 128,
        "lr": 0.05 if images < 2_000 else 0.1,
    }
    if (weights := settings.get("weights")) and not network:
        chosen["backbone"] = backbone_of(Path(weights)) or backbone
    if weights or (fixed and settings.get("pretrained", True)):
        chosen["epochs"] = float(max(round(chosen["epochs"] / 3), 5))  # a pretrained network needs fewer
    chosen["evaluate_every"] = max(round(chosen["epochs"] / EVALUATIONS), 1)
    chosen["warmup"] = -(-images // chosen["batch_size"])  # one epoch
    base = TrainConfig(**{**vars(where), **chosen})
    return Suggestion(splits, with_default_optimizer(from_dict(settings, base), settings), side, grey)


def smaller_settings(suggestion: Suggestion, config: TrainConfig, free: Collection[str]) -> Iterator[TrainConfig]:
    """The configuration, then smaller networks and images, as far as these settings are `free` to change."""
    yield config
    side = config.image_size or suggestion.side
    for _, size, networks in reversed(SIZES):
        if (
            size > side
            or (size < side and ("image_size" not in free or config.image_size is None))
            or size < 32 <= side
        ):
            continue
        names = [name for _, name in reversed(networks)] if "backbone" in free else [config.backbone]
        if size == side and config.backbone in names:
            names = names[names.index(config.backbone) + 1 :]
        augment = _augment(size, grey=suggestion.grey) if "augment" in free else config.augment
        for name in names:
            yield replace(config, backbone=name, augment=augment, image_size=config.image_size and size)


def for_minutes(
    suggestion: Suggestion,
    config: TrainConfig,
    minutes: float,
    seconds_of: Callable[[TrainConfig], float],
    free: Collection[str] = ("backbone", "image_size", "augment", "epochs"),
) -> TrainConfig:
    """The largest network and images that train long enough in so many minutes, and for how many epochs.

    Long enough is a third of the usual epochs. If nothing is, the smallest network is trained for the epochs that fit.
    Settings that cannot be quick enough, to judge by the last trial, are not tried.

    Args:
        suggestion: the images and their usual settings.
        config: the usual settings.
        minutes: how long training may take.
        seconds_of: measures how long the steps of a configuration take on this machine.
        free: settings that may be changed.
    """
    if config.epochs is None:
        raise UserError("a length in minutes does not go with --iterations; give only one of them")
    chosen, epochs, start, seconds_of_pixel = config, config.epochs, time.monotonic(), 0.0
    fewest = config.epochs * (FEWEST_EPOCHS if "epochs" in free else 1)
    *larger, smallest = smaller_settings(suggestion, config, free)
    for chosen in [*larger, smallest]:
        left = (60 * minutes - round(time.monotonic() - start)) * STEPS_SHARE  # trials take time, and decode all images
        pixels = (chosen.image_size or 1) ** 2
        if chosen is not smallest and seconds_of_pixel * pixels * fewest > CHEAPER * left:
            continue
        seconds = max(seconds_of(chosen) / config.epochs, 1e-9)
        seconds_of_pixel, fitting = seconds / pixels, left / seconds
        epochs = min(config.epochs, max(float(int(fitting)), 1.0)) if "epochs" in free else config.epochs
        if fitting >= fewest:
            break
    return replace(chosen, epochs=epochs, evaluate_every=max(round(epochs / EVALUATIONS), 1))


def _side_and_colour(images: Images) -> tuple[int, bool]:
    """Median of the shorter sides, and whether the images are grey, by the headers of some of them."""
    if isinstance(images, MemoryImages):
        return int(min(images.pixels.shape[2:])), images.pixels.shape[1] == 1
    assert isinstance(images, DecodedImages)
    sample = np.unique(np.linspace(0, len(images) - 1, SAMPLED_HEADERS).astype(int)).tolist()
    headers = [header for index in sample if (header := images.header(index))[0]]
    if not headers:
        path = images.path(sample[0])
        if isinstance(images, FileImages) and not path.exists():
            raise UserError(
                f"none of the images was found, for example {path}; "
                "give the folder that the paths are relative to with --root FOLDER"
            )
        images.open(sample[0])  # raises an error that says what is wrong
    side = int(np.median([min(width, height) for width, height, _ in headers]))
    return side, all(mode in GREY_MODES for _, _, mode in headers)


def _augment(size: int, *, grey: bool) -> tuple[str, ...]:
    """Crops, and flips for colour images; grey images are often writing or scans, so they are not mirrored."""
    window = "small-crop" if size <= 12 else "crop" if size <= 128 else "resized-crop"
    return (window,) if grey else (window, "flip")
