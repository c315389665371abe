"""A small network for 8x8 digits: three convolutions, 64-d features."""

from __future__ import annotations

from torch import Tensor, nn


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
