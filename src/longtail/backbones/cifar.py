"""CIFAR ResNets: three stages of 16, 32 and 64 channels on 32x32 images, 64-d features.

Shortcuts carry no parameters (subsample, then pad with zero channels), so ResNet-32 with a
10-class linear head has 464,154 parameters.

Paper: He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (section 4.2, option A).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
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
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
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


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))
