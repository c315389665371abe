"""The network of a configuration, and the transforms of its images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from longtail.backbones import build_backbone
from longtail.backbones.library import build_library, input_settings, library_of
from longtail.backbones.weights import load_backbone
from longtail.config import TrainConfig
from longtail.data.augment import Transform, clean_transform, training_transform
from longtail.data.splits import image_side, statistics
from longtail.errors import choose
from longtail.heads.kinds import SAVED_HEADS
from longtail.heads.layers import head_of, with_head
from longtail.methods import TRAIN_METHODS
from longtail.networks.objective import Objective


def settled(config: TrainConfig) -> TrainConfig:
    """The configuration with the input size, normalisation and architecture of a network of timm or Hugging Face.

    Settings that are given stay.
    """
    library = library_of(config.backbone)
    if library is None or (config.image_size and config.mean and (library == "timm" or config.architecture)):
        return config
    given = {name: value for name in ("image_size", "mean", "std") if (value := getattr(config, name))}
    return replace(config, **{**input_settings(config.backbone), **given})


def build_network(
    config: TrainConfig, class_counts: torch.Tensor, channels: int, *, start: bool = False
) -> tuple[nn.Module, Objective]:
    """A new network of a settled configuration, and its objective.

    The weights are random; with `start` they are those that training starts from.
    """
    method = TRAIN_METHODS[choose("method", config.method, TRAIN_METHODS)]
    weights = Path(config.weights) if start and config.weights else None
    if library_of(config.backbone) is None:
        model, objective = method.build(build_backbone(config.backbone, channels), class_counts, config.options)
        if weights:
            load_backbone(model.get_submodule("backbone"), weights)
        return model, objective
    pretrained = start and config.pretrained
    backbone = build_library(config.backbone, image_side(config), config.architecture, weights, pretrained)
    return method.build(backbone, class_counts, config.options)


def with_head_of_kind(model: nn.Module, kind: str) -> nn.Module:
    """A copy of a network whose head is a new layer of another kind, of the same shape."""
    old = head_of(model)
    return with_head(model, SAVED_HEADS[choose("head", kind, SAVED_HEADS)](old.in_features, old.out_features))


def transforms(config: TrainConfig, stream: int = 0) -> tuple[Transform, Transform]:
    """(augmenting, clean) transforms of a configuration; streams differ in their random numbers."""
    seed = int(np.random.SeedSequence((config.seed, stream)).generate_state(1, np.uint64)[0])
    sized: dict[str, Any] = {"image_size": config.image_size, "interpolation": config.interpolation}
    augmenting = training_transform(config.augment, *statistics(config), seed=seed, **sized)
    return augmenting, clean_transform(config.augment, *statistics(config), **sized)
