"""Layers that resize images of any size for an exported network, as Pillow does in the library.

Pillow resizes with a triangle filter (bilinear) or a cubic one, first along rows, then along columns, and rounds to
whole pixels after each. Each pass is one product with a matrix that depends only on the size of the image; the results
equal Pillow's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from longtail.data.augment import Resize, ResizeCenterCrop
from longtail.data.images import as_array
from longtail.data.splits import image_side, statistics
from longtail.errors import UserError
from longtail.runs.folder import Run
from longtail.runs.prediction import UPRIGHT, in_words, resizing

PRECISION = 2.0**22  # Pillow's weights are integer multiples of 1 / PRECISION
GREY = (19595, 38470, 7471)  # weights of red, green and blue in a grey value, in 65536ths, as in Pillow


class Preparation(nn.Module):
    """RGB images (N, H, W, 3) uint8 to (N, C, size, size) float32 from 0 to 1.

    Args:
        decode: how the library resizes an image.
        channels: 3, or 1 for grey.
    """

    def __init__(self, decode: Resize, channels: int) -> None:
        super().__init__()
        self.size, self.channels = decode.size, channels
        self.centre = isinstance(decode, ResizeCenterCrop)
        self.kernel = KERNELS[getattr(decode, "interpolation", "bilinear")]

    def forward(self, pictures: Tensor) -> Tensor:
        images = _grey(pictures) if self.channels == 1 else pictures
        images = images.permute(0, 3, 1, 2).to(torch.float64)
        height, width = (torch.scalar_tensor(images.shape[axis], dtype=torch.float64) for axis in (2, 3))
        shorter = torch.minimum(height, width) * 7 / 8
        columns = _weights(images.shape[3], width, shorter if self.centre else width, self.size, self.kernel)
        rows = _weights(images.shape[2], height, shorter if self.centre else height, self.size, self.kernel)
        resized = _rounded(rows @ _rounded(images @ columns.T))
        return resized.to(torch.float32) / 255


def _triangle(distances: Tensor) -> Tensor:
    return (1 - distances).clamp(min=0.0)


def _cubic(distances: Tensor) -> Tensor:
    """Keys' cubic with a = -1/2."""
    near = (1.5 * distances - 2.5) * distances * distances + 1
    far = (((distances - 5) * distances + 8) * distances - 4) * -0.5
    return torch.where(distances < 1, near, torch.where(distances < 2, far, 0.0))


# Interpolation → weight of a pixel by its distance, in new pixels or, where the image grows, in old ones.
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": _triangle, "bicubic": _cubic}


def _weights(pixels: int, extent: Tensor, window: Tensor, size: int, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Weight of each pixel of a line in each of `size` new pixels, (size, pixels), for the `window` at its centre."""
    step = window / size
    reach = step.clamp(min=1.0)
    middles = (extent - window) / 2 + (torch.arange(size, dtype=torch.float64) + 0.5) * step
    distances = torch.arange(pixels, dtype=torch.float64) + 0.5 - middles.unsqueeze(1)
    shares = kernel(distances.abs() / reach)
    shares = shares / shares.sum(1, keepdim=True) * PRECISION
    return torch.floor(shares.abs() + 0.5) * shares.sign() / PRECISION


def _rounded(pixels: Tensor) -> Tensor:
    return torch.floor(pixels + 0.5).clamp(0.0, 255.0)


def _grey(pictures: Tensor) -> Tensor:
    red, green, blue = pictures.to(torch.float64).split(1, dim=3)
    return torch.floor((GREY[0] * red + GREY[1] * green + GREY[2] * blue) / 65536 + 0.5)


TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 2, 5)
# Sizes of the checked images for a file with preprocessing, as multiples of the network's side.
CHECKED_SIDES = (1.0, 0.6, 2.7)


class Deployed(nn.Module):
    """Images (N, C, H, W) from 0 to 1 to logits (N, K); the normalisation is part of the network.

    With a `preparation` it takes images (N, H, W, 3) uint8 of any size instead.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], preparation: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.preparation = preparation or nn.Identity()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.network((self.preparation(images) - self.mean) / self.std)


@dataclass(frozen=True)
class Deployment:
    """A network to write, and the information needed to use it."""

    network: Deployed
    shape: tuple[int, int, int]
    details: dict[str, Any]
    decode: Resize | None = None  # how the library resizes images, if resizing is part of the network

    @classmethod
    def of_run(cls, run: Run, with_preprocessing: bool = False) -> Deployment:
        model = run.model().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        _fix_weights(model)
        side = image_side(run.config)
        shape = (run.channels, side, side)
        if with_preprocessing:
            takes = "images (N, H, W, 3), uint8, RGB, of any height and width"
            left = f"{UPRIGHT}; convert to RGB; resizing and normalisation are inside the network"
        else:
            colour = ", RGB" if run.channels == 3 else ""
            takes = f"images (N, {run.channels}, {side}, {side}), float32, pixels from 0 to 1{colour}"
            left = f"{in_words(run)}; normalisation is inside the network"
        mean, std = statistics(run.config)
        details = {
            "input": takes,
            "preprocessing": left,
            "mean": mean,
            "std": std,
            "interpolation": run.config.interpolation,
            "backbone": run.config.backbone,
            "output": f"logits (N, {len(run.class_names)})",
            "class_names": run.class_names,
            "method": run.config.method,
            "calibration": run.calibration.method if run.calibration else None,
            "longtail": run.record.versions["longtail"],
            "model": run.model_identity,
        }
        decode = resizing(run) if with_preprocessing else None
        preparation = Preparation(decode, run.channels) if decode else None
        network = Deployed(model, mean, std, preparation).eval()
        return cls(network, shape, details, decode)

    @property
    def instructions(self) -> str:
        """How to prepare an image for the network, in words."""
        return f"prepare images like this: {self.details['preprocessing']}"

    def images(self, count: int, sides: float = 1.0) -> Tensor:
        """Random images, the same in every call; `sides` times as high as the network's images, and a little wider."""
        random = torch.Generator().manual_seed(count)
        if self.decode is None:
            return torch.rand(count, *self.shape, generator=random)
        height = max(int(self.decode.size * sides), 2)
        size = (count, height, height + height // 3, 3)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=random)

    @property
    def dynamic_axes(self) -> dict[str, dict[int, torch.export.Dim]]:
        """The dynamic axes: the number of images, and height and width with preprocessing."""
        names = ("batch",) if self.decode is None else ("batch", "height", "width")
        return {"images": {axis: torch.export.Dim(name) for axis, name in enumerate(names)}}

    def program(self) -> torch.export.ExportedProgram:
        """The traced network."""
        with torch.no_grad():
            return torch.export.export(self.network, (self.images(2),), dynamic_shapes=self.dynamic_axes)

    def expected(self, images: Tensor) -> Tensor:
        """The logits of this library, which resizes images with Pillow."""
        if self.decode is None:
            return self.network(images)
        mode = "L" if self.shape[0] == 1 else "RGB"
        pictures = [Image.fromarray(image).convert(mode) for image in images.numpy()]
        pixels = np.stack([as_array(self.decode(picture, np.zeros(0))) for picture in pictures])
        scaled = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
        return self.network.network((scaled - self.network.mean) / self.network.std)

    def compare(self, other: Callable[[Tensor], Any], what: str) -> float:
        """The largest difference between the logits of a written network and ours; raises if it is too large."""
        largest = 0.0
        for count, sides in zip(CHECKED_BATCHES, CHECKED_SIDES, strict=True):
            images = self.images(count, sides)
            with torch.no_grad():
                ours, theirs = self.expected(images), torch.as_tensor(other(images))
            largest = max(largest, float((ours - theirs).abs().max()))
            if not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
                raise UserError(
                    f"the {what} gives other logits than torch for {count} images (by up to {largest:.1e}); "
                    "nothing was written: export it as torch-export or safetensors"
                )
        return largest


def _fix_weights(model: nn.Module) -> None:
    """Replace weights that are computed in every pass, such as normalised class vectors, by fixed numbers."""
    for module in list(model.modules()):
        if is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                remove_parametrizations(module, name, leave_parametrized=True)
