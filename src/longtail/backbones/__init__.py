"""Networks from images to features, by name. `BACKBONES[name](in_channels)` builds one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from longtail.backbones.resnet import Backbone, BasicBlock, Bottleneck, CifarResNet, DigitsNet, ResNet
from longtail.errors import UserError, choose

__all__ = ["BACKBONES", "Backbone", "build_backbone", "num_features"]
BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
    "resnet8": partial(CifarResNet, 8),
    "resnet14": partial(CifarResNet, 14),
    "resnet20": partial(CifarResNet, 20),
    "resnet32": partial(CifarResNet, 32),
    "resnet44": partial(CifarResNet, 44),
    "resnet56": partial(CifarResNet, 56),
    "resnet10": partial(ResNet, BasicBlock, (1, 1, 1, 1)),
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
    "resnext50": partial(ResNet, Bottleneck, (3, 4, 6, 3), groups=32, width=4),
}


def build_backbone(name: str, in_channels: int = 3) -> nn.Module:
    """A new backbone with random weights.

    >>> build_backbone("resnet32").num_features
    64
    """
    if ":" in name:
        raise UserError(f"unknown backbone {name!r}; those of other libraries are timm:NAME, hf:NAME and hf:FOLDER")
    return BACKBONES[choose("backbone", name, BACKBONES)](in_channels=in_channels)


def num_features(backbone: nn.Module) -> int:
    """The width of a backbone's features."""
    width = getattr(backbone, "num_features", None)
    if not isinstance(width, int):
        kind = type(backbone).__name__
        raise UserError(f"{kind} has no attribute num_features, the width of its features; set {kind}.num_features")
    return width
