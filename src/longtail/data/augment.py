"""Augmentation of whole batches, and the transform that ends in normalised floats.

Random numbers are a pure function of the seed and of the draw's number in the sampler's stream. So an image is
augmented in the same way for any batch size, worker process or number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from longtail.data.autoaugment import AutoAugment, brightness, color, contrast, rotate
from longtail.data.decode import RandomResizedCrop, Resize, ResizeCenterCrop
from longtail.data.images import Decode
from longtail.errors import choose


class Augmentation(Protocol):
    """Pixels (B, C, H, W) uint8 and numbers (B, columns) in [0, 1) to pixels of the same shape."""

    columns: int

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Crop:
    """Pad with black, by an eighth of the side, and cut a random window of the original size."""

    padding: int | None = None
    columns = 2

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        height, width = pixels.shape[2:]
        pad = max(min(height, width) // 8, 1) if self.padding is None else self.padding
        padded = torch.nn.functional.pad(pixels, (pad, pad, pad, pad))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        top, left = (numbers * (2 * pad + 1)).long().unbind(1)
        return windows[torch.arange(len(pixels), device=pixels.device), :, top, left]


@dataclass(frozen=True)
class Flip:
    """Mirror half of the images left to right."""

    columns = 1

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers.view(-1, 1, 1, 1) < 0.5, pixels.flip(3), pixels)


@dataclass(frozen=True)
class VerticalFlip:
    """Mirror half of the images top to bottom: for images without a natural top, such as aerial images."""

    columns = 1

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers.view(-1, 1, 1, 1) < 0.5, pixels.flip(2), pixels)


@dataclass(frozen=True)
class Rotate:
    """Rotate by up to 15 degrees either way; the corners become black."""

    degrees: float = 15.0
    columns = 1

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        return rotate(pixels, self.degrees * (2 * numbers[:, 0] - 1), fill=0)


@dataclass(frozen=True)
class QuarterTurn:
    """Rotate by 0, 90, 180 or 270 degrees: for images without a natural top."""

    columns = 1

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        turns = (numbers[:, 0] * 4).long()
        turned = torch.stack([pixels.rot90(turn, (2, 3)) for turn in range(4)])
        return turned[turns, torch.arange(len(pixels), device=pixels.device)]


@dataclass(frozen=True)
class Cutout:
    """Black out a square around a random pixel, cut off at the border (DeVries and Taylor, 2017)."""

    size: int = 16
    columns = 2

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        height, width = pixels.shape[2:]
        rows = self._hit(numbers[:, 0], height).unsqueeze(2)
        columns = self._hit(numbers[:, 1], width).unsqueeze(1)
        return pixels.masked_fill((rows & columns).unsqueeze(1), 0)

    def _hit(self, numbers: Tensor, extent: int) -> Tensor:
        """(B, extent): which lines the square covers."""
        start = (numbers * extent).long().unsqueeze(1) - self.size // 2
        lines = torch.arange(extent, device=numbers.device)
        return (lines >= start) & (lines < start + self.size)


@dataclass(frozen=True)
class ColorJitter:
    """Scale brightness, contrast and saturation, each by a factor in 1 ± strength."""

    strength: float = 0.4
    columns = 3

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        factors = 1 + self.strength * (2 * numbers - 1)
        pixels = brightness(pixels, factors[:, 0])
        pixels = contrast(pixels, factors[:, 1])
        return color(pixels, factors[:, 2])


AUGMENTATIONS: dict[str, Callable[[], Augmentation]] = {
    "crop": Crop,
    "small-crop": lambda: Crop(padding=1),
    "flip": Flip,
    "vertical-flip": VerticalFlip,
    "rotate": Rotate,
    "quarter-turn": QuarterTurn,
    "cutout": Cutout,
    "autoaugment": AutoAugment,
    "jitter": ColorJitter,
}
# Determines how an image from a file gets its size, so it is not one of the batched augmentations.
RESIZED_CROP = "resized-crop"
AUGMENTATION_NAMES = (*AUGMENTATIONS, RESIZED_CROP)


@dataclass(frozen=True)
class Transform:
    """From drawn indices to normalised images (B, C, H, W) float32.

    Args:
        augmentations: applied in this order.
        mean: per-channel mean of the pixels scaled to 0..1.
        std: per-channel standard deviation of the pixels scaled to 0..1.
        decode: how images read from files get their size.
        seed: with the number of the draw, determines every random number.
    """

    augmentations: tuple[Augmentation, ...]
    mean: Sequence[float]
    std: Sequence[float]
    decode: Decode | None = None
    seed: int = 0

    @property
    def columns(self) -> int:
        decode = self.decode.columns if self.decode else 0
        return decode + sum(augmentation.columns for augmentation in self.augmentations)

    def numbers(self, draws: np.ndarray) -> np.ndarray:
        """Random numbers (B, columns) of the draws with these numbers (B,)."""
        blocks = -(-self.columns // 4)  # one step of Philox's counter gives four numbers
        values = np.empty((len(draws), 4 * blocks))
        starts = np.flatnonzero(np.diff(draws, prepend=-2) != 1)  # of draws that follow each other
        for start, stop in pairwise([*starts, len(draws)]):
            stream = np.random.Philox(key=self.seed, counter=int(draws[start]) * blocks)
            np.random.Generator(stream).random(out=values[start:stop])
        return values[:, : self.columns]

    def augment(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        """Apply the augmentations; `numbers` (B, columns without those of decoding)."""
        numbers = numbers.to(pixels.device)
        for augmentation in self.augmentations:
            pixels = augmentation(pixels, numbers[:, : augmentation.columns])
            numbers = numbers[:, augmentation.columns :]
        return pixels

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 to float32 with mean 0 and standard deviation 1 per channel, channels last in memory."""
        mean = torch.tensor(self.mean, device=pixels.device).view(1, -1, 1, 1) * 255
        scale = 1 / (torch.tensor(self.std, device=pixels.device).view(1, -1, 1, 1) * 255)
        pixels = pixels.to(torch.float32, memory_format=torch.channels_last)
        return pixels.sub_(mean).mul_(scale)


def training_transform(
    names: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    image_size: int | None,
    seed: int,
    interpolation: str = "bilinear",
) -> Transform:
    """The named augmentations; `resized-crop` determines how images get their size."""
    for name in names:
        choose("augmentation", name, AUGMENTATION_NAMES)
    chosen = tuple(AUGMENTATIONS[name]() for name in names if name in AUGMENTATIONS)
    decode: Decode | None = None
    if image_size:
        kind = RandomResizedCrop if RESIZED_CROP in names else Resize
        decode = kind(image_size, interpolation)
    return Transform(chosen, mean, std, decode, seed)


def clean_transform(
    names: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    image_size: int | None,
    interpolation: str = "bilinear",
) -> Transform:
    """No augmentation: the transform at test time for a network trained with the named augmentations."""
    decode: Decode | None = None
    if image_size:
        kind = ResizeCenterCrop if RESIZED_CROP in names else Resize
        decode = kind(image_size, interpolation)
    return Transform((), mean, std, decode)
