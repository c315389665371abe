"""Networks from images to features, by name: `BACKBONES[name](in_channels)` builds one. And how any network is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from longtail.backbones.resnet import Backbone, BasicBlock, Bottleneck, CifarResNet, DigitsNet, ResNet
from longtail.errors import UserError, choose

__all__ = ["BACKBONES", "BATCH", "Backbone", "build_backbone", "evaluating", "folded", "num_features"]
BATCH = 64  # of inference; larger ones exceed what the allocator keeps, and every layer pays for page faults again
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


def folded(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode in which batch-norms are part of the convolutions before them: a tenth faster.

    Both are linear, so the outputs differ by rounding only. Only in an `nn.Sequential` and in the backbones of this
    library are modules listed in the order in which they run. Other modules are not changed, nor are batch-norms that
    do more, such as timm's with an activation.
    """
    copy = deepcopy(network)
    copy.eval()
    for module in list(copy.modules()):
        if not (
            type(module).forward is nn.Sequential.forward or type(module).__module__.startswith("longtail.backbones")
        ):
            continue
        for (name, layer), (next_name, following) in pairwise(list(module.named_children())):
            if type(layer) is nn.Conv2d and type(following) is nn.BatchNorm2d:
                setattr(module, name, fuse_conv_bn_eval(layer, following))
                setattr(module, next_name, nn.Identity())
    return copy


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module returns to its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
    except NotImplementedError as error:
        raise UserError(
            f"{type(model).__name__} cannot be put into evaluation mode ({error}); if it is an exported program, "
            "calibrate the model before it is exported"
        ) from error
    try:
        with torch.no_grad():  # tensors cached in inference mode could not be used in training
            yield
    finally:
        for module, mode in modes:
            module.training = mode
