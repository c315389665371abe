"""Converts an image of any mode and size to RGB and a fixed size, with Pillow.

Paper: Szegedy et al., Going Deeper with Convolutions, CVPR 2015 (random resized crop).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# Numbers of Pillow's Image.Resampling; Pillow is imported when the first image is opened.
FILTERS = {"bilinear": 2, "bicubic": 3}
MOST_16_BIT = 65535


# For some other formats Pillow starts a program: Ghostscript for PostScript, whatever the suffix of the file is.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "JPEG2000")
MOST_PIXELS = 100_000_000  # decoding takes up to 16 bytes of memory per pixel
MOST_PIXELS_OF = dict.fromkeys(("JPEG2000", "WEBP"), MOST_PIXELS // 2)  # their decoders take more
MOST_SIDE = 65_535  # as in JPEG; resizing takes memory for each row and column
STRIP = 256  # rows that are converted at a time


@contextmanager
def opened_picture(source: Path | BytesIO) -> Iterator[Image.Image]:
    """Open an image and read its header; raises if its format is not allowed or if it has too many pixels."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(source, formats=FORMATS) as picture:
            most = MOST_PIXELS_OF.get(picture.format or "", MOST_PIXELS)
            if picture.width * picture.height > most or max(picture.size) > MOST_SIDE:
                size = f"{picture.width:,} x {picture.height:,}"
                raise ValueError(f"it has {size} pixels, more than {most:,} or more than {MOST_SIDE:,} in a line")
            yield picture


def as_rgb(picture: Image.Image) -> Image.Image:
    """An image of any mode as RGB: rotated as its EXIF data say, 16 bits scaled to 8 bits.

    Transparent pixels keep the colour stored in the file.
    """
    from PIL import ExifTags, Image, ImageOps

    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown scale")
    if picture.mode.startswith("I"):
        return Image.fromarray(_eight_bits(picture)).convert("RGB")
    # Through RGBA, because Pillow reads the transparency of a palette only in this way.
    return picture.convert("RGBA").convert("RGB") if picture.mode in ("P", "PA") else picture.convert("RGB")


def _eight_bits(picture: Image.Image) -> np.ndarray:
    """Pixels (H, W) of a 16-bit image, scaled: Pillow clips at 255, which makes nearly every such image white."""
    pixels = np.empty((picture.height, picture.width), np.uint8)
    for top in range(0, picture.height, STRIP):
        numbers = np.asarray(picture.crop((0, top, picture.width, min(top + STRIP, picture.height))))
        if numbers.min() < 0 or numbers.max() > MOST_16_BIT:
            raise ValueError("it has more than 16 bits per pixel")
        pixels[top : top + STRIP] = numbers // 257
    return pixels


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random window of 8–100 % of the area and aspect ratio 3/4–4/3, resized to a square.

    The window is clipped at the border of the image, so every draw is valid.
    """

    size: int
    interpolation: str = "bilinear"
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


@dataclass(frozen=True)
class ResizeCenterCrop:
    """Resize the shorter side to 8/7 of the size, then cut the centre: 256 and 224 for ImageNet."""

    size: int
    interpolation: str = "bilinear"
    columns = 0

    def __str__(self) -> str:
        return (
            f"cut the square of 7/8 of the shorter side at the centre and resize it to {self.size} x {self.size} "
            f"({self.interpolation}, antialiased, as Pillow does)"
        )

    def __call__(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        side = min(picture.size) * 7 / 8
        left, top = (picture.width - side) / 2, (picture.height - side) / 2
        return _resized(picture, self.size, (left, top, left + side, top + side), FILTERS[self.interpolation])


@dataclass(frozen=True)
class Resize:
    """Resize the whole image to a square; an image that already has this size is not changed."""

    size: int
    interpolation: str = "bilinear"
    columns = 0

    def __str__(self) -> str:
        return (
            f"resize the whole image to {self.size} x {self.size}, whatever its shape ({self.interpolation}, "
            "antialiased, as Pillow does)"
        )

    def __call__(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        return _resized(picture, self.size, (0, 0, *picture.size), FILTERS[self.interpolation])


def resized_arrays(
    pixels: np.ndarray, decode: Callable[[Image.Image, np.ndarray], Image.Image], numbers: np.ndarray
) -> np.ndarray:
    """Pixels (N, size, size, C) of images (N, H, W, C) uint8, each resized with its row of random numbers."""
    from PIL import Image

    channels = pixels.shape[3]
    pictures = (Image.fromarray(array[:, :, 0] if channels == 1 else array) for array in pixels)
    arrays = [np.asarray(decode(picture, numbers[row])) for row, picture in enumerate(pictures)]
    return np.stack(arrays).reshape(len(arrays), *arrays[0].shape[:2], channels)


def _resized(picture: Image.Image, size: int, box: tuple[float, float, float, float], resample: int) -> Image.Image:
    """A window of an image resized to a square, rows before columns.

    Pillow 13 and later resize the columns of tall images first, which changes some pixels by 1 of 255; in two calls
    every version gives the same pixels.
    """
    left, top, right, bottom = box
    narrow = picture.resize((size, picture.height), resample, (left, 0, right, picture.height))
    return narrow.resize((size, size), resample, (0, top, size, bottom))
