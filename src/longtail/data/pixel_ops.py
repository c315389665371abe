"""Pillow's image operations on whole batches: uint8 in, uint8 out, the same values as Pillow gives.

Every function takes pixels (B, 3, H, W) uint8 and one number per image (B,).
Pillow works image by image; a batch of CIFAR images here costs a few milliseconds in all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grey(pixels: Tensor) -> Tensor:
    """Luma as Pillow's mode L, (B, 1, H, W) uint8; grey images are returned as they are."""
    if pixels.shape[1] == 1:
        return pixels
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=pixels.device).view(1, 3, 1, 1)
    return ((pixels.int() * weights).sum(1, keepdim=True).add_(0x8000) >> 16).to(torch.uint8)


def blend(background: Tensor, pixels: Tensor, amount: Tensor) -> Tensor:
    """`background + amount * (pixels - background)`, truncated and clipped to 0..255."""
    low = background.float()
    mixed = low + amount.float().view(-1, 1, 1, 1) * (pixels.float() - low)
    return mixed.clamp_(0, 255).to(torch.uint8)


def brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    return blend(torch.zeros_like(pixels), pixels, amount)


def color(pixels: Tensor, amount: Tensor) -> Tensor:
    return blend(grey(pixels), pixels, amount)


def contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    mean = grey(pixels).double().mean(dim=(1, 2, 3), keepdim=True).add_(0.5).floor_()
    return blend(mean, pixels, amount)


def sharpness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Blend with a 3x3 smoothing (5 in the middle, 1 around, over 13) that leaves the border alone."""
    channels = pixels.shape[1]
    kernel = torch.full((channels, 1, 3, 3), 1.0, device=pixels.device)
    kernel[:, :, 1, 1] = 5.0
    smooth = pixels.float()
    inner = F.conv2d(smooth, kernel, groups=channels)
    smooth[:, :, 1:-1, 1:-1] = (inner / 13 + 0.5).floor_()
    return blend(smooth, pixels, amount)


def posterize(pixels: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits of each value."""
    mask = (0xFF << (8 - bits.int())) & 0xFF
    return pixels & mask.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(pixels: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values at or above the threshold."""
    return torch.where(pixels < threshold.view(-1, 1, 1, 1), pixels, 255 - pixels)


def invert(pixels: Tensor, _: Tensor) -> Tensor:
    return 255 - pixels


def autocontrast(pixels: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its brightest 255."""
    low = pixels.amin(dim=(2, 3), keepdim=True).double()
    high = pixels.amax(dim=(2, 3), keepdim=True).double()
    # A true division: torch turns `255 / x` into `255 * (1 / x)`, which rounds otherwise.
    scale = torch.full_like(high, 255.0) / (high - low).clamp_(min=1)
    stretched = (pixels * scale - low * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, pixels)


def equalize(pixels: Tensor, _: Tensor) -> Tensor:
    """Flatten the histogram of each channel."""
    batch, channels, height, width = pixels.shape
    flat = pixels.reshape(batch * channels, height * width).long()
    histogram = torch.zeros(batch * channels, 256, dtype=torch.long, device=pixels.device)
    histogram.scatter_add_(1, flat, torch.ones_like(flat))
    brightest = histogram.gather(1, flat.amax(1, keepdim=True))
    step = (height * width - brightest) // 255
    before = histogram.cumsum(1) - histogram
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=pixels.device))
    return table.gather(1, flat).to(torch.uint8).view_as(pixels)


def affine(pixels: Tensor, matrix: Tensor, fill: int) -> Tensor:
    """Nearest-neighbour affine transform; `matrix` (B, 6) maps output to input pixels as Pillow's does."""
    batch, channels, height, width = pixels.shape
    # Pillow works in fixed point, 16 bits behind the point; so must we to hit the same pixels.
    x = torch.arange(width, device=pixels.device)
    y = torch.arange(height, device=pixels.device).view(-1, 1)
    a, b, c, d, e, f = matrix.double().view(-1, 6, 1, 1).unbind(1)
    source_x = (_fixed(a) * x + _fixed(b) * y + _fixed(c + 0.5 * (a + b))) >> 16
    source_y = (_fixed(d) * x + _fixed(e) * y + _fixed(f + 0.5 * (d + e))) >> 16
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    source = (source_y * width + source_x).masked_fill_(~inside, 0).view(batch, 1, -1)
    moved = pixels.reshape(batch, channels, -1).gather(2, source.expand(-1, channels, -1))
    return moved.view_as(pixels).masked_fill_(~inside.unsqueeze(1), fill)


def _fixed(values: Tensor) -> Tensor:
    return (values * 65536 + 0.5).floor().long()
