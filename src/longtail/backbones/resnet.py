"""ResNets for photographs and for CIFAR, and a small network for 8x8 digits.

ResNet-10, 18, 34, 50, 101, 152 and ResNeXt-50 32x4d have torchvision's parameter names, so published ImageNet weights
can be loaded. CIFAR ResNets have three stages of 16, 32 and 64 channels on 32x32 images. Their shortcuts carry no
parameters (subsample, then pad with zero channels), so ResNet-32 with a 10-class linear head has 464,154 parameters.

Papers: He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (CIFAR: section 4.2, option A);
Xie et al., Aggregated Residual Transformations for Deep Neural Networks, CVPR 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; used by ResNet-10, 18 and 34."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = self.shortcut(in_channels, channels, stride)

    def shortcut(self, in_channels: int, channels: int, stride: int) -> nn.Module | None:
        """A 1x1 convolution where the shape changes."""
        if stride == 1 and in_channels == channels:
            return None
        return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def residual(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.residual(x).add_(shortcut), inplace=True)


class Bottleneck(BasicBlock):
    """1x1, 3x3 (in groups for ResNeXt), 1x1 convolutions."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int = 1, width: int = 64) -> None:
        nn.Module.__init__(self)
        middle, out = channels * width // 64 * groups, channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = self.shortcut(in_channels, out, stride)

    def residual(self, x: Tensor) -> Tensor:
        return self.bn3(self.conv3(F.relu(super().residual(x), inplace=True)))


class PaddedShortcut(nn.Module):
    """Every other pixel, and channels of zeros around the given ones."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride, self.before = stride, new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class CifarBlock(BasicBlock):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def shortcut(self, in_channels: int, channels: int, stride: int) -> nn.Module | None:
        changes = stride != 1 or in_channels != channels
        return PaddedShortcut(stride, channels - in_channels) if changes else None


class Backbone(nn.Module):
    """Features (N, num_features) are the mean of the feature map, which is `last_block(early_map(images))`."""

    num_features: int
    early_map: Callable[[Tensor], Tensor]

    @property
    def last_block(self) -> nn.Module:
        raise NotImplementedError

    def feature_map(self, x: Tensor) -> Tensor:
        """Features before pooling, (N, num_features, height, width)."""
        return self.last_block(self.early_map(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.feature_map(x).mean(dim=(2, 3))


class Staged(Backbone):
    """A convolution, pooling, and stages layer1, layer2, … of blocks; from the second on they halve the map's sides."""

    def __init__(
        self,
        first: nn.Conv2d,
        pool: nn.Module | None,
        block: type[BasicBlock],
        depths: Sequence[int],
        mode: Literal["fan_in", "fan_out"],
        **settings: int,
    ) -> None:
        super().__init__()
        width = channels = first.out_channels
        self.conv1, self.bn1, self.maxpool = first, nn.BatchNorm2d(width), pool
        self.stages = len(depths)
        for number, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(block(channels, width * 2**number, stride, **settings))
                channels = width * 2**number * block.expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.num_features = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode=mode)

    def stage(self, number: int) -> nn.Sequential:
        return cast(nn.Sequential, self.get_submodule(f"layer{number}"))

    @property
    def last_block(self) -> nn.Module:
        return self.stage(self.stages)[-1]

    def early_map(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = x if self.maxpool is None else self.maxpool(x)
        for number in range(1, self.stages):
            x = self.stage(number)(x)
        return self.stage(self.stages)[:-1](x)


class ResNet(Staged):
    """Images (N, in_channels, H, W) to features (N, 512) or (N, 2048); the feature map has sides H/32 and W/32.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: blocks in each of the four stages.
        in_channels: 3 for colour images.
        settings: of the blocks: groups and width (32 and 4 for ResNeXt-50 32x4d).
    """

    def __init__(
        self, block: type[BasicBlock], depths: Sequence[int], *, in_channels: int = 3, **settings: int
    ) -> None:
        first = nn.Conv2d(in_channels, 64, 7, 2, padding=3, bias=False)
        super().__init__(first, nn.MaxPool2d(3, 2, padding=1), block, depths, "fan_out", **settings)


class CifarResNet(Staged):
    """Images (N, in_channels, H, W) to features (N, 64); the feature map has sides H/4 and W/4.

    Args:
        depth: 6n + 2 layers: 8, 14, 20, 32, 44, 56, …
        in_channels: 3 for colour images, 1 for grey ones.
    """

    def __init__(self, depth: int, in_channels: int = 3) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet has 6n + 2 layers (8, 14, 20, …), not {depth}")
        first = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        super().__init__(first, None, CifarBlock, 3 * [(depth - 2) // 6], "fan_in")


class DigitsNet(Backbone):
    """Images (N, in_channels, 8, 8) to features (N, 64); the feature map has sides of 4."""

    num_features = 64

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((in_channels, 16, 1), (16, 32, 2), (32, self.num_features, 1)):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    @property
    def last_block(self) -> nn.Module:
        return self.layers[-3:]

    def early_map(self, x: Tensor) -> Tensor:
        return self.layers[:-3](x)
