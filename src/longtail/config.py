"""The settings of a training run: one flat record, from a recipe, a TOML file and the command line.

This file imports nothing heavy: `longtail --help` reads it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from longtail.errors import UserError, choose, number, whole_number
from longtail.files.reading import read_text, reading

# Default number of processes that decode images: more processes than usable cores would wait for each other.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how the long tail is made."""

    data: str = "digits"
    """Kind of data set; `longtail train --help` lists the kinds and their files."""
    root: str | None = None
    """Folder of the data set (default: $LONGTAIL_CACHE or ~/.cache/longtail)."""
    train_list: str | None = None
    """File of the training images: a list with 'path label' per line, a .csv, or a .parquet file."""
    validation_list: str | None = None
    """File of the validation images; without it some of the training images are held out."""
    test_list: str | None = None
    """File of the test images."""
    path_column: str | None = None
    """Column of the paths (or images) in a CSV or Parquet file, if it is not called path, image, file, …"""
    label_column: str | None = None
    """Column of the labels in a CSV or Parquet file, if it is not called label, class, target, …"""
    profile: Literal["none", "exp", "step"] = "none"
    """Shape of the long tail that is cut from the data set; 'none' keeps all images."""
    imbalance: float = 100.0
    """Imbalance factor: images of the largest class divided by images of the smallest."""
    subset: Literal["standard", "seeded"] = "seeded"
    """Which images stay: 'standard' are those that the field's papers train on (the rule of LDAM-DRW's code, the same
    for every seed), 'seeded' are drawn by the seed."""
    shuffle_classes: bool = False
    """Order the classes from head to tail randomly (by the seed) instead of in the order of the data set."""
    validation: float = 0.1
    """Share of the training images of every class that is held out for validation; 0 for none."""
    validation_from: Literal["every", "head"] = "every"
    """Hold out validation images of 'every' class, or only of the larger half ('head'), so tail classes lose none."""
    skip_broken: bool = False
    """Skip images that cannot be read, and count them, instead of stopping."""
    seed: int = 0
    """Random seed of the selected images, their order, augmentation and the initial weights."""

    def __post_init__(self) -> None:
        """Check every setting against its type and its bounds; TOML and JSON files may have anything."""
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            option = f"--{name.replace('_', '-')}"
            if value is None and type(None) in kinds:
                continue
            if get_origin(hint) is Literal:
                choose(name, value, kinds)
            elif name in BOUNDS and float in kinds:
                number(option, value, **BOUNDS[name])
            elif name in BOUNDS:
                whole_number(option, value, at_least=int(BOUNDS[name]["at_least"]))
            elif hint is bool and not isinstance(value, bool):
                raise UserError(f"{name} must be true or false, not {value!r}")
            elif hint in (str, str | None) and (not isinstance(value, str) or "\0" in value):
                raise UserError(f"{name} must be text, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataConfig):
    """A stage-one training run."""

    method: str = "softmax"
    """Training method; `longtail methods` lists the names."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of the method, as name value pairs."""
    sampler: str | None = None
    """Sampler to use instead of that of the method: instance, class-balanced, square-root, …"""

    backbone: str
    """Network: digits, resnet8/14/20/32/44/56 (CIFAR), resnet10/18/34/50/101/152, resnext50; or one of another
    library, with its published weights: timm:NAME, hf:NAME or hf:FOLDER (Hugging Face)."""
    pretrained: bool = True
    """Networks of timm and Hugging Face start from published weights, of the Hub or its cache on this machine;
    --no-pretrained: from random ones."""
    weights: str | None = None
    """Start from the weights in this .safetensors or .pth file."""
    train: str = "all"
    """What is trained: all; lora (low-rank adapters, merged in the end); last:N (the last N blocks and what follows);
    head (the features of the frozen network are computed once, and Probe fits the head)."""
    image_size: int | None = None
    """Images are resized to this side (pixels)."""
    interpolation: tyro.conf.Fixed[Literal["bilinear", "bicubic"]] = "bilinear"
    """How images are resized; like mean, std and architecture no option: that of the pretrained network."""
    mean: tyro.conf.Fixed[tuple[float, ...] | None] = None
    """Mean per channel of the pixels from 0 to 1; None for that of the data set."""
    std: tyro.conf.Fixed[tuple[float, ...] | None] = None
    """Standard deviation per channel."""
    architecture: tyro.conf.Fixed[dict[str, Any]] = field(default_factory=dict)
    """Configuration of a Hugging Face network, from which it is built without the Hub."""
    augment: tuple[str, ...] = ()
    """Augmentations in order: crop, small-crop, flip, vertical-flip, rotate, quarter-turn, cutout, autoaugment,
    jitter, resized-crop. The page "Your own folder" of the docs shows each."""
    mix: Literal["none", "mixup", "cutmix", "remix"] = "none"
    """Mix pairs of images and their labels in every batch; only with losses that take soft targets."""
    mix_alpha: float = 1.0
    """The share of the first image of a pair is drawn from Beta(alpha, alpha): small values mix little."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes; only with losses that take soft targets."""
    defer: float | None = None
    """Deferred re-weighting (DRW): after this share of the epochs, class-balanced weights (beta 0.9999)."""

    epochs: float | None = None
    """Length of training in passes over the data (or give --iterations)."""
    iterations: int | None = None
    """Length of training in batches."""
    batch_size: int = 128
    """Images per step and stream of images (BBN has two, Hybrid-SC three), over all processes."""
    accumulate: int = 1
    """Split each batch into this many micro-batches to save memory (gradient accumulation)."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimiser; AdamW needs a smaller --lr, about 0.001."""
    lr: float = 0.1
    """Learning rate after warm-up; falls to 0 along a cosine."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay; AdamW applies it to neither biases nor normalisation layers."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block of the network to the one before it; 1 for the same rate."""
    clip_norm: float | None = None
    """Scale the gradient down where its norm is larger than this."""
    ema: float | None = None
    """Decay per step (0.999, …) of a moving average of the weights, which is evaluated and saved in their stead."""
    warmup: int = 0
    """Steps over which the learning rate rises to --lr."""
    warmup_from: tyro.conf.Fixed[float] = 0.0
    """Learning rate at the start of the warm-up; no option, for the recipes of the released code."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, …"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward pass, for GPUs: bf16, or fp16 on older ones; slower than fp32 on most processors."""
    compile: bool = False
    """Compile the network with torch.compile."""
    workers: int = WORKERS
    """Processes that decode images read from files."""
    cache_gb: float = 4.0
    """Decode images read from files once, into $LONGTAIL_CACHE, if they take at most this many GB; 0 for never."""
    evaluate_every: int = 1
    """Epochs between evaluations on the validation split."""
    checkpoint_every: int = 1
    """Epochs between checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.iterations is None):
            raise UserError("give the length of training with either --epochs or --iterations")
        if not isinstance(self.options, dict) or not isinstance(self.augment, tuple):
            raise UserError("options must be names and values, and augment a list of names")
        if not re.fullmatch(r"all|head|lora|last:[1-9]\d{0,5}", self.train):
            raise UserError(f"--train must be all, head, lora or last:N (the last N blocks), not {self.train!r}")
        for name, bounds in (("mean", {}), ("std", {"above": 0.0})):
            values = getattr(self, name)
            if values is not None and (not isinstance(values, tuple) or len(values) not in (1, 3)):
                raise UserError(f"{name} must list one number per channel, not {values!r}")
            for value in values or ():
                number(name, value, **bounds)
        if (self.mean is None) != (self.std is None) or not isinstance(self.architecture, dict):
            raise UserError("mean and std are given together, and architecture is a table of names and values")


# Bounds of the settings that are numbers; `None` is allowed where it is the default.
BOUNDS: dict[str, dict[str, float]] = {
    "imbalance": {"at_least": 1},
    "validation": {"at_least": 0, "below": 1},
    "seed": {"at_least": 0},
    "epochs": {"above": 0, "at_most": 1e9},
    "lr": {"above": 0},
    "momentum": {"at_least": 0, "below": 1},
    "weight_decay": {"at_least": 0},
    "layer_decay": {"above": 0, "at_most": 1},
    "mix_alpha": {"above": 0},
    "label_smoothing": {"at_least": 0, "below": 1},
    "defer": {"at_least": 0, "below": 1},
    "clip_norm": {"above": 0},
    "ema": {"above": 0, "below": 1},
    "warmup_from": {"at_least": 0},
    "cache_gb": {"at_least": 0},
    **{name: {"at_least": 0} for name in ("workers", "warmup")},
    **{
        name: {"at_least": 1}
        for name in ("iterations", "batch_size", "accumulate", "image_size", "evaluate_every", "checkpoint_every")
    },
}
MAX_TOML = 1 << 16  # bytes; time and memory of a dotted name (a.a.a…) grow with the square of its length
MAX_LINE = 10_000  # characters

# Settings that may differ when a run is resumed: they do not change the result.
OF_MACHINE = ("root", "device", "workers", "cache_gb", "checkpoint_every")


def from_dict(values: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """A configuration from plain values (a TOML or JSON file), on top of `base`."""
    names = [item.name for item in fields(TrainConfig)]
    if not isinstance(values, dict):
        raise UserError("a configuration must be a table of names and values")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in values:
        choose("setting", name, names)
    if isinstance(values.get("augment"), list | tuple):
        values["augment"] = tuple(map(str, values["augment"]))
    values |= {name: tuple(values[name]) for name in ("mean", "std") if isinstance(values.get(name), list)}
    if isinstance(values.get("options"), dict):
        values["options"] = {name: str(value) for name, value in values["options"].items()}
    # Both give the length of training, so one replaces the other.
    if values.get("epochs") is not None and "iterations" not in values:
        values["iterations"] = None
    if values.get("iterations") is not None and "epochs" not in values:
        values["epochs"] = None
    if base is None and "backbone" not in values:
        raise UserError("the configuration names no backbone")
    return replace(base, **values) if base else TrainConfig(**values)


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, as `from_dict` takes them."""
    with reading(path, "valid TOML"):
        text = read_text(path, "a TOML file", max_bytes=MAX_TOML)
        if max(map(len, text.splitlines()), default=0) > MAX_LINE:
            raise UserError(f"{path} has a line of more than {MAX_LINE:,} characters; settings are shorter")
        settings = tomllib.loads(text)
        json.dumps(settings, default=str)  # raises for whole numbers of thousands of digits, which cannot be printed
        return settings


def comparable(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide what is computed."""
    return {name: value for name, value in asdict(config).items() if name not in OF_MACHINE}


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Settings that change the result and differ: 'lr: 0.1 → 0.2'."""
    before, after = comparable(old), comparable(new)
    return [f"{name}: {before[name]} → {after[name]}" for name in before if before[name] != after[name]]


def describe(config: TrainConfig, name: str | None = None) -> str:
    """Data set, tail, network and length of training in one line."""
    tail = f" long-tailed ({config.profile}, imbalance {config.imbalance:g})" if config.profile != "none" else ""
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.iterations:,} iterations"
    return f"{name or config.data}{tail}, {config.backbone}, {length} of batch {config.batch_size}"
