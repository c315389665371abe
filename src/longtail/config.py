"""What a training run is: one flat record, from a recipe, a TOML file and the command line.

This file imports nothing heavy: `longtail --help` reads it.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from longtail.errors import UserError, choose


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how their tail is cut."""

    data: str = "digits"
    """Kind of data set; `longtail train --help` lists them with what they look like on disk."""
    root: str | None = None
    """Folder of the data set (default: $LONGTAIL_CACHE or ~/.cache/longtail)."""
    train_list: str | None = None
    """File of the training images: a list with 'path label' per line, a .csv, or a .parquet file."""
    validation_list: str | None = None
    """The same of the validation images; without one a part of the training images is held out."""
    test_list: str | None = None
    """The same of the test images."""
    profile: Literal["none", "exp", "step"] = "none"
    """How class sizes are made to fall from head to tail; 'none' leaves the data set as it is."""
    imbalance: float = 100.0
    """Imbalance factor: images of the largest class over images of the smallest."""
    shuffle_classes: bool = False
    """Let the seed decide which classes are head and which are tail, instead of the data set's order."""
    validation: float = 0.1
    """Share of every class's training images held out for validation; 0 for none."""
    validation_from: Literal["every", "head"] = "every"
    """Classes that give validation images: 'every' class, or the larger half ('head'), which costs the tail nothing."""
    skip_broken: bool = False
    """Leave out images that cannot be read, and count them, instead of stopping."""
    seed: int = 0
    """Decides which images are kept, their order, augmentation and the first weights."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataConfig):
    """A stage-one training run."""

    method: str = "softmax"
    """How to train: `longtail methods` lists the names."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of the method, as name value pairs."""
    sampler: str | None = None
    """Order of the images, instead of the method's own: instance, class-balanced, square-root, …"""

    backbone: str = "digits"
    """Network: digits, resnet8/20/32/44/56 (CIFAR), resnet10/50/101/152, resnext50."""
    weights: str | None = None
    """Start from the weights in this .safetensors or .pth file."""
    image_size: int | None = None
    """Side of the square pictures read from files are brought to."""
    augment: tuple[str, ...] = ()
    """Augmentations in order: crop, small-crop, flip, autoaugment, cutout, jitter, resized-crop."""

    epochs: float | None = None
    """Length of training in passes over the data (or give --iterations)."""
    iterations: int | None = None
    """Length of training in batches."""
    batch_size: int = 128
    """Images per step and stream of images (BBN has two, Hybrid-SC three), over all processes."""
    accumulate: int = 1
    """Work each batch in this many parts to save memory."""
    lr: float = 0.1
    """Learning rate after warm-up; falls to 0 along a cosine."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay of SGD."""
    warmup: int = 0
    """Steps over which the learning rate rises to --lr."""
    warmup_from: float = 0.0
    """Learning rate at the start of the warm-up."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, …"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass."""
    compile: bool = False
    """Compile the network with torch.compile."""
    workers: int = 4
    """Processes that decode images read from files."""
    evaluate_every: int = 1
    """Epochs between evaluations on the validation split."""
    checkpoint_every: int = 1
    """Epochs between checkpoints."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.iterations is None):
            raise UserError("give the length of training as either --epochs or --iterations")
        for name in ("epochs", "iterations", "batch_size", "accumulate", "lr", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name.replace('_', '-')} must be positive, not {value}")


# May differ when a run is resumed: they say where the work is done, not what is computed.
PLACES = ("root", "device", "workers", "checkpoint_every")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    return asdict(config)


def from_dict(values: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """A configuration from plain values (a TOML or JSON file), on top of `base`."""
    known = [item.name for item in fields(TrainConfig)]
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in values:
        choose("setting", name, known)
    if "augment" in values:
        values["augment"] = tuple(values["augment"])
    if "options" in values:
        values["options"] = {name: str(value) for name, value in values["options"].items()}
    # Giving one way to say the length takes the place of the other.
    if values.get("epochs") is not None and "iterations" not in values:
        values["iterations"] = None
    if values.get("iterations") is not None and "epochs" not in values:
        values["epochs"] = None
    return replace(base, **values) if base else TrainConfig(**values)


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, as `from_dict` takes them."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def comparable(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide what is computed."""
    return {name: value for name, value in to_dict(config).items() if name not in PLACES}


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Settings that change the result and differ: 'lr: 0.1 → 0.2'."""
    before, after = comparable(old), comparable(new)
    return [f"{name}: {before[name]} → {after[name]}" for name in before if before[name] != after[name]]


def describe(config: TrainConfig) -> str:
    """Data, tail, network and length of training in one line."""
    tail = f" long-tailed ({config.profile}, imbalance {config.imbalance:g})" if config.profile != "none" else ""
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.iterations:,} iterations"
    return f"{config.data}{tail}, {config.backbone}, {length} of batch {config.batch_size}"
