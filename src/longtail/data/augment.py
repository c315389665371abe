"""From an opened picture to normalised floats: RGB, one size, augmentation of whole batches.

Random numbers are a pure function of the seed and of the draw's number in the sampler's stream. So an image is
augmented in the same way for any batch size, worker process or number of processes.

Paper: Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (random resized crop).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.data.autoaugment import autoaugment, brightness, color, contrast, rotate
from longtail.errors import choose

if TYPE_CHECKING:
    from PIL import Image

# Numbers of Pillow's Image.Resampling; Pillow is imported when the first image is opened.
FILTERS = {"bilinear": 2, "bicubic": 3}
MAX_16_BIT = 65535
# For some other formats Pillow starts a program: Ghostscript for PostScript, whatever the suffix of the file is.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "JPEG2000")
MAX_PIXELS = 100_000_000  # decoding takes up to 16 bytes of memory per pixel
MAX_PIXELS_OF = dict.fromkeys(("JPEG2000", "WEBP"), MAX_PIXELS // 2)  # their decoders take more
MAX_SIDE = 65_535  # as in JPEG; resizing takes memory for each row and column
STRIP = 256  # rows that are converted at a time


@contextmanager
def opened_picture(source: Path | BytesIO) -> Iterator[Image.Image]:
    """Open an image and read its header; raises if its format is not allowed or if it has too many pixels."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(source, formats=FORMATS) as picture:
            most = MAX_PIXELS_OF.get(picture.format or "", MAX_PIXELS)
            if picture.width * picture.height > most or max(picture.size) > MAX_SIDE:
                size = f"{picture.width:,} x {picture.height:,}"
                raise ValueError(f"it has {size} pixels, more than {most:,} or more than {MAX_SIDE:,} in a line")
            yield picture


def as_rgb(picture: Image.Image) -> Image.Image:
    """An image of any mode as RGB: rotated by its EXIF orientation, 16 bits scaled to 8 bits.

    Transparent pixels keep the colour stored in the file.
    """
    from PIL import ExifTags, Image, ImageOps

    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown scale")
    if not picture.mode.startswith("I"):
        # Through RGBA, because Pillow reads the transparency of a palette only in this way.
        return picture.convert("RGBA").convert("RGB") if picture.mode in ("P", "PA") else picture.convert("RGB")
    # Scaled here: Pillow clips 16-bit pixels at 255, which makes nearly every such image white.
    pixels = np.empty((picture.height, picture.width), np.uint8)
    for top in range(0, picture.height, STRIP):
        numbers = np.asarray(picture.crop((0, top, picture.width, min(top + STRIP, picture.height))))
        if numbers.min() < 0 or numbers.max() > MAX_16_BIT:
            raise ValueError("it has more than 16 bits per pixel")
        pixels[top : top + STRIP] = numbers // 257
    return Image.fromarray(pixels).convert("RGB")


@dataclass(frozen=True)
class Resize:
    """Resize the whole image to a square; an image that already has this size is not changed.

    The base class of all ways to give images one size. `columns` is the number of random numbers that an image takes.
    """

    size: int
    interpolation: str = "bilinear"
    columns: ClassVar[int] = 0

    def __str__(self) -> str:
        return (
            f"resize the whole image to {self.size} x {self.size}, whatever its shape ({self.interpolation}, "
            "antialiased, as Pillow does)"
        )

    def __call__(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        return self._window(picture, 0, 0, *picture.size)

    def _window(self, picture: Image.Image, left: float, top: float, right: float, bottom: float) -> Image.Image:
        """A window of an image resized to a square, rows before columns.

        Pillow 13 and later resize the columns of tall images first, which changes some pixels by 1 of 255; in two calls
        every version gives the same pixels.
        """
        size, resample = self.size, FILTERS[self.interpolation]
        narrow = picture.resize((size, picture.height), resample, (left, 0, right, picture.height))
        return narrow.resize((size, size), resample, (0, top, size, bottom))


class ResizeCenterCrop(Resize):
    """Resize the shorter side to 8/7 of the size, then cut the centre: 256 and 224 for ImageNet."""

    def __str__(self) -> str:
        return (
            f"cut the square of 7/8 of the shorter side at the centre and resize it to {self.size} x {self.size} "
            f"({self.interpolation}, antialiased, as Pillow does)"
        )

    def __call__(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        side = min(picture.size) * 7 / 8
        left, top = (picture.width - side) / 2, (picture.height - side) / 2
        return self._window(picture, left, top, left + side, top + side)


class RandomResizedCrop(Resize):
    """A random window of 8–100 % of the area and aspect ratio 3/4–4/3, resized to a square.

    The window is clipped at the border of the image, so every draw is valid.
    """

    columns = 4

    def __call__(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        area = picture.width * picture.height * (0.08 + 0.92 * numbers[0])
        aspect = math.exp(math.log(4 / 3) * (2 * numbers[1] - 1))
        width = min(max(round(math.sqrt(area * aspect)), 1), picture.width)
        height = min(max(round(math.sqrt(area / aspect)), 1), picture.height)
        left = int(numbers[2] * (picture.width - width + 1))
        top = int(numbers[3] * (picture.height - height + 1))
        box = (left, top, left + width, top + height)
        return picture.resize((self.size, self.size), FILTERS[self.interpolation], box)


class Augmentation(NamedTuple):
    """A function from pixels (B, C, H, W) uint8 and numbers (B, columns) in [0, 1) to pixels of the same shape."""

    columns: int
    apply: Callable[[Tensor, Tensor], Tensor]


def crop(pixels: Tensor, numbers: Tensor, padding: int | None = None) -> Tensor:
    """Pad with black, by an eighth of the side, and cut a random window of the original size."""
    height, width = pixels.shape[2:]
    pad = max(min(height, width) // 8, 1) if padding is None else padding
    padded = torch.nn.functional.pad(pixels, (pad, pad, pad, pad))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    top, left = (numbers * (2 * pad + 1)).long().unbind(1)
    return windows[torch.arange(len(pixels), device=pixels.device), :, top, left]


def flip(pixels: Tensor, numbers: Tensor, dimension: int = 3) -> Tensor:
    """Mirror half of the images left to right; top to bottom in dimension 2, for images without a natural top."""
    return torch.where(numbers.view(-1, 1, 1, 1) < 0.5, pixels.flip(dimension), pixels)


def rotate_slightly(pixels: Tensor, numbers: Tensor, degrees: float = 15.0) -> Tensor:
    """Rotate by up to 15 degrees either way; the corners become black."""
    return rotate(pixels, degrees * (2 * numbers[:, 0] - 1), fill=0)


def quarter_turn(pixels: Tensor, numbers: Tensor) -> Tensor:
    """Rotate by 0, 90, 180 or 270 degrees: for images without a natural top."""
    turns = (numbers[:, 0] * 4).long()
    turned = torch.stack([pixels.rot90(turn, (2, 3)) for turn in range(4)])
    return turned[turns, torch.arange(len(pixels), device=pixels.device)]


def cutout(pixels: Tensor, numbers: Tensor, size: int = 16) -> Tensor:
    """Black out a square around a random pixel, cut off at the border (DeVries and Taylor, 2017)."""
    covered = []
    for column, extent in enumerate(pixels.shape[2:]):
        start = (numbers[:, column] * extent).long().unsqueeze(1) - size // 2
        lines = torch.arange(extent, device=pixels.device)
        covered.append((lines >= start) & (lines < start + size))
    return pixels.masked_fill((covered[0].unsqueeze(2) & covered[1].unsqueeze(1)).unsqueeze(1), 0)


def jitter(pixels: Tensor, numbers: Tensor, strength: float = 0.4) -> Tensor:
    """Scale brightness, contrast and saturation, each by a factor in 1 ± strength."""
    factors = 1 + strength * (2 * numbers - 1)
    return color(contrast(brightness(pixels, factors[:, 0]), factors[:, 1]), factors[:, 2])


AUGMENTATIONS: dict[str, Augmentation] = {
    "crop": Augmentation(2, crop),
    "small-crop": Augmentation(2, partial(crop, padding=1)),
    "flip": Augmentation(1, flip),
    "vertical-flip": Augmentation(1, partial(flip, dimension=2)),
    "rotate": Augmentation(1, rotate_slightly),
    "quarter-turn": Augmentation(1, quarter_turn),
    "cutout": Augmentation(2, cutout),
    "autoaugment": Augmentation(5, autoaugment),
    "jitter": Augmentation(3, jitter),
}
# Determines how an image from a file gets its size, so it is not one of the batched augmentations.
RESIZED_CROP = "resized-crop"
AUGMENTATION_NAMES = (*AUGMENTATIONS, RESIZED_CROP)


@dataclass(frozen=True)
class Transform:
    """From drawn indices to normalised images (B, C, H, W) float32."""

    augmentations: tuple[Augmentation, ...]  # applied in this order
    mean: Sequence[float]  # per channel, of the pixels scaled to 0..1
    std: Sequence[float]
    decode: Resize | None = None  # how images read from files get their size
    seed: int = 0  # with the number of the draw, it determines every random number

    def numbers(self, draws: np.ndarray) -> np.ndarray:
        """Random numbers (B, columns) of the draws with these numbers (B,)."""
        columns = sum(one.columns for one in (self.decode, *self.augmentations) if one)
        blocks = -(-columns // 4)  # one step of Philox's counter gives four numbers
        values = np.empty((len(draws), 4 * blocks))
        starts = np.flatnonzero(np.diff(draws, prepend=-2) != 1)  # of draws that follow each other
        for start, stop in pairwise([*starts, len(draws)]):
            stream = np.random.Philox(key=self.seed, counter=int(draws[start]) * blocks)
            np.random.Generator(stream).random(out=values[start:stop])
        return values[:, :columns]

    def augment(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        """Apply the augmentations; `numbers` (B, columns without those of decoding)."""
        numbers = numbers.to(pixels.device)
        for columns, apply in self.augmentations:
            pixels = apply(pixels, numbers[:, :columns])
            numbers = numbers[:, columns:]
        return pixels

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 to float32 with mean 0 and standard deviation 1 per channel, channels last in memory."""
        mean = torch.tensor(self.mean, device=pixels.device).view(1, -1, 1, 1) * 255
        scale = 1 / (torch.tensor(self.std, device=pixels.device).view(1, -1, 1, 1) * 255)
        pixels = pixels.to(torch.float32, memory_format=torch.channels_last)
        return pixels.sub_(mean).mul_(scale)


def build_transform(
    names: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    image_size: int | None,
    seed: int | None = None,
    interpolation: str = "bilinear",
) -> Transform:
    """The named augmentations or, without a seed, the transform at test time for a network trained with them.

    `resized-crop` determines how images get their size.
    """
    for name in names:
        choose("augmentation", name, AUGMENTATION_NAMES)
    window = ResizeCenterCrop if seed is None else RandomResizedCrop
    decode = (window if RESIZED_CROP in names else Resize)(image_size, interpolation) if image_size else None
    if seed is None:
        return Transform((), mean, std, decode)
    return Transform(tuple(AUGMENTATIONS[name] for name in names if name in AUGMENTATIONS), mean, std, decode, seed)
