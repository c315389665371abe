"""The network of a configuration, and the transforms of its images."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from longtail.backbones import build_backbone
from longtail.config import TrainConfig
from longtail.data.augment import Transform, clean_transform, training_transform
from longtail.data.splits import Splits
from longtail.errors import choose
from longtail.heads.kinds import SAVED_HEADS
from longtail.heads.layers import head_of, with_head
from longtail.methods import TRAIN_METHODS
from longtail.networks.objective import Objective


def build_network(config: TrainConfig, class_counts: torch.Tensor, channels: int) -> tuple[nn.Module, Objective]:
    """A new network of a configuration, with random weights, and its objective."""
    method = TRAIN_METHODS[choose("method", config.method, TRAIN_METHODS)]
    return method.build(build_backbone(config.backbone, channels), class_counts, config.options)


def with_head_of_kind(model: nn.Module, kind: str) -> nn.Module:
    """A copy of a network whose head is a new layer of another kind, of the same shape."""
    old = head_of(model)
    return with_head(model, SAVED_HEADS[choose("head", kind, SAVED_HEADS)](old.in_features, old.out_features))


def transforms(config: TrainConfig, splits: Splits, stream: int = 0) -> tuple[Transform, Transform]:
    """(augmenting, clean) transforms of a configuration; streams differ in their random numbers."""
    size = config.image_size
    seed = int(np.random.SeedSequence((config.seed, stream)).generate_state(1, np.uint64)[0])
    augmenting = training_transform(config.augment, splits.mean, splits.std, image_size=size, seed=seed)
    return augmenting, clean_transform(config.augment, splits.mean, splits.std, image_size=size)
