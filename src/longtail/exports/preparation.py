"""Layers that resize images of any size for an exported network, as Pillow does in the library.

Pillow resizes with a triangle filter, first along rows, then along columns, and rounds to whole pixels after each.
Each pass is one product with a matrix that depends only on the size of the image; the results equal Pillow's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longtail.data.decode import ResizeCenterCrop
from longtail.data.images import Decode

PRECISION = 2.0**22  # Pillow's weights are integer multiples of 1 / PRECISION
GREY = (19595, 38470, 7471)  # weights of red, green and blue in a grey value, in 65536ths, as in Pillow


class Preparation(nn.Module):
    """RGB images (N, H, W, 3) uint8 to (N, C, size, size) float32 from 0 to 1.

    Args:
        decode: how the library resizes an image.
        channels: 3, or 1 for grey.
    """

    def __init__(self, decode: Decode, channels: int) -> None:
        super().__init__()
        self.size, self.channels = decode.size, channels
        self.centre = isinstance(decode, ResizeCenterCrop)

    def forward(self, pictures: Tensor) -> Tensor:
        images = _grey(pictures) if self.channels == 1 else pictures
        images = images.permute(0, 3, 1, 2).to(torch.float64)
        height, width = (torch.scalar_tensor(images.shape[axis], dtype=torch.float64) for axis in (2, 3))
        shorter = torch.minimum(height, width) * 7 / 8
        columns = _weights(images.shape[3], width, shorter if self.centre else width, self.size)
        rows = _weights(images.shape[2], height, shorter if self.centre else height, self.size)
        resized = _rounded(rows @ _rounded(images @ columns.T))
        return resized.to(torch.float32) / 255


def _weights(pixels: int, extent: Tensor, window: Tensor, size: int) -> Tensor:
    """Weight of each pixel of a line in each of `size` new pixels, (size, pixels), for the `window` at its centre."""
    step = window / size
    reach = step.clamp(min=1.0)
    middles = (extent - window) / 2 + (torch.arange(size, dtype=torch.float64) + 0.5) * step
    distances = torch.arange(pixels, dtype=torch.float64) + 0.5 - middles.unsqueeze(1)
    shares = (1 - distances.abs() / reach).clamp(min=0.0)
    return torch.floor(shares / shares.sum(1, keepdim=True) * PRECISION + 0.5) / PRECISION


def _rounded(pixels: Tensor) -> Tensor:
    return torch.floor(pixels + 0.5).clamp(0.0, 255.0)


def _grey(pictures: Tensor) -> Tensor:
    red, green, blue = pictures.to(torch.float64).split(1, dim=3)
    return torch.floor((GREY[0] * red + GREY[1] * green + GREY[2] * blue) / 65536 + 0.5)
