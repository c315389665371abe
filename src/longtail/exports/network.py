"""The network to export: plain layers from images to logits, for any number of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from longtail.data.images import Decode, as_array
from longtail.data.open import image_side, statistics
from longtail.errors import UserError
from longtail.exports.preparation import Preparation
from longtail.runs.folder import Run
from longtail.runs.prediction import UPRIGHT, in_words, resizing

TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 2, 5)
CHECKED_SIDES = (
    1.0,
    0.6,
    2.7,
)  # sizes of the test images for a file with preprocessing, as multiples of the network's side


class Deployed(nn.Module):
    """Images (N, C, H, W) from 0 to 1 to logits (N, K); the normalisation is part of the network.

    With a `preparation` it takes images (N, H, W, 3) uint8 of any size instead.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        preparation: nn.Module | None = None,
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
    decode: Decode | None = None  # how the library resizes images, if resizing is part of the network

    @classmethod
    def of_run(cls, run: Run, with_preprocessing: bool = False) -> Deployment:
        model = run.load_model().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        _make_plain(model)
        side = image_side(run.config)
        shape = (run.channels, side, side)
        if with_preprocessing:
            takes = "images (N, H, W, 3), uint8, RGB, of any height and width"
            left = f"{UPRIGHT}; convert to RGB; resizing and normalisation are inside the network"
        else:
            colour = ", RGB" if run.channels == 3 else ""
            takes = f"images (N, {run.channels}, {side}, {side}), float32, pixels from 0 to 1{colour}"
            left = f"{in_words(run)}; normalisation is inside the network"
        details = {
            "input": takes,
            "preprocessing": left,
            "output": f"logits (N, {len(run.class_names)})",
            "class_names": run.class_names,
            "method": run.config.method,
            "calibration": run.calibration.method if run.calibration else None,
            "longtail": run.record.versions["longtail"],
            "model": run.model_identity,
        }
        decode = resizing(run) if with_preprocessing else None
        preparation = Preparation(decode, run.channels) if decode else None
        network = Deployed(model, *statistics(run.config.data), preparation).eval()
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
    def free(self) -> dict[str, dict[int, torch.export.Dim]]:
        """The dynamic axes: the number of images, and height and width with preprocessing."""
        names = ("batch",) if self.decode is None else ("batch", "height", "width")
        return {"images": {axis: torch.export.Dim(name) for axis, name in enumerate(names)}}

    def program(self) -> torch.export.ExportedProgram:
        """The traced network."""
        with torch.no_grad():
            return torch.export.export(self.network, (self.images(2),), dynamic_shapes=self.free)

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


def _make_plain(model: nn.Module) -> None:
    """Replace weights that are computed in every pass, such as normalised class vectors, by fixed numbers."""
    for module in list(model.modules()):
        if is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                remove_parametrizations(module, name, leave_parametrized=True)
