"""ResNets for photographs and for CIFAR, and a small network for 8x8 digits.

ResNet-10, 18, 34, 50, 101, 152 and ResNeXt-50 32x4d have torchvision's parameter names, so published ImageNet weights
can be loaded. CIFAR ResNets have three stages of 16, 32 and 64 channels on 32x32 images. Their shortcuts carry no
parameters (subsample, then pad with zero channels), so ResNet-32 with a 10-class linear head has 464,154 parameters.

Papers: He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (CIFAR: section 4.2, option A);
Xie et al., Aggregated Residual Transformations for Deep Neural Networks, CVPR 2017.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


def _conv_bn(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; used by ResNet-10, 18 and 34."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        resized = stride != 1 or in_channels != channels
        self.downsample = _conv_bn(in_channels, channels, stride) if resized else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + shortcut, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 (in groups for ResNeXt), 1x1 convolutions."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int, width: int) -> None:
        super().__init__()
        middle, out = channels * width // 64 * groups, channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        resized = stride != 1 or in_channels != out
        self.downsample = _conv_bn(in_channels, out, stride) if resized else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        return F.relu(self.bn3(self.conv3(out)) + shortcut, inplace=True)


class ResNet(nn.Module):
    """Images (N, in_channels, H, W) to features (N, 512) or (N, 2048).

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: blocks in each of the four stages.
        groups: groups of the 3x3 convolution (32 for ResNeXt-50 32x4d).
        width: channels per group where the stage has 64 (4 for ResNeXt-50 32x4d).
        in_channels: 3 for colour images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        groups: int = 1,
        width: int = 64,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for number, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(block(channels, 64 * 2**number, stride, groups, width))
                channels = 64 * 2**number * block.expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.num_features = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def feature_map(self, x: Tensor) -> Tensor:
        """Features before pooling, (N, C, H/32, W/32)."""
        return self._last_stage(self._first_stages(x))

    @property
    def last_block(self) -> nn.Module:
        return self._last_stage[-1]

    def early_map(self, x: Tensor) -> Tensor:
        """The input of the last block."""
        return self._last_stage[:-1](self._first_stages(x))

    @property
    def _last_stage(self) -> nn.Sequential:
        return cast(nn.Sequential, self.get_submodule("layer4"))

    def _first_stages(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        for number in (1, 2, 3):
            x = self.get_submodule(f"layer{number}")(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.feature_map(x).mean(dim=(2, 3))


class CifarBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.new_channels = channels - in_channels

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and self.new_channels == 0:
            return x
        before = self.new_channels // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out.add_(self.shortcut(x)), inplace=True)


class CifarResNet(nn.Module):
    """Images (N, in_channels, H, W) to features (N, 64).

    Args:
        depth: 6n + 2 layers: 8, 14, 20, 32, 44, 56, …
        in_channels: 3 for colour images, 1 for grey ones.
    """

    num_features = 64

    def __init__(self, depth: int, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a CIFAR ResNet has 6n + 2 layers (8, 14, 20, …), not {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _cifar_stage(16, 16, blocks, stride=1)
        self.layer2 = _cifar_stage(16, 32, blocks, stride=2)
        self.layer3 = _cifar_stage(32, 64, blocks, stride=2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def feature_map(self, x: Tensor) -> Tensor:
        """Features before pooling, (N, 64, H/4, W/4)."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.layer3(self.layer2(self.layer1(x)))

    @property
    def last_block(self) -> nn.Module:
        return self.layer3[-1]

    def early_map(self, x: Tensor) -> Tensor:
        """The input of the last block."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.layer3[:-1](self.layer2(self.layer1(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.feature_map(x).mean(dim=(2, 3))


def _cifar_stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = CifarBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(CifarBlock(channels, channels, 1) for _ in range(blocks - 1)))


class DigitsNet(nn.Module):
    """Images (N, in_channels, 8, 8) to features (N, 64)."""

    num_features = 64

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *self._layer(in_channels, 16, 1), *self._layer(16, 32, 2), *self._layer(32, self.num_features, 1)
        )

    @staticmethod
    def _layer(in_channels: int, channels: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(channels), nn.ReLU()]

    def feature_map(self, x: Tensor) -> Tensor:
        """Features before pooling, (N, 64, 4, 4)."""
        return self.layers(x)

    @property
    def last_block(self) -> nn.Module:
        return self.layers[-3:]

    def early_map(self, x: Tensor) -> Tensor:
        """The input of the last block."""
        return self.layers[:-3](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.feature_map(x).mean(dim=(2, 3))
