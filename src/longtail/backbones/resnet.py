"""ResNet-10, 18, 34, 50, 101, 152 and ResNeXt-50 32x4d for photographs, parameter names as in torchvision.

Because the names agree, published ImageNet weights can be loaded directly.

Papers: He et al., Deep Residual Learning for Image Recognition, CVPR 2016;
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
