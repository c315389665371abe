"""The network as others run it: plain layers, pixels from 0 to 1 in, logits out, any number of images at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from longtail.data.open import image_side, statistics
from longtail.errors import UserError
from longtail.runs.folder import Run
from longtail.runs.prediction import in_words

TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 2, 5)


class Deployed(nn.Module):
    """Images (N, C, H, W) from 0 to 1 to logits (N, K): normalisation is inside, so nobody can forget it."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.network((images - self.mean) / self.std)


@dataclass(frozen=True)
class Deployment:
    """A network ready to be written, and what one has to know to use it."""

    network: Deployed
    shape: tuple[int, int, int]
    details: dict[str, Any]

    @classmethod
    def of_run(cls, run: Run) -> Deployment:
        model = run.load_model().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        _make_plain(model)
        side = image_side(run.config)
        shape = (run.channels, side, side)
        details = {
            "input": f"images (N, {shape[0]}, {side}, {side}), float32, pixels from 0 to 1"
            + (", RGB" if shape[0] == 3 else ""),
            "preprocessing": f"{in_words(run)}; normalisation is inside the network",
            "output": f"logits (N, {len(run.class_names)})",
            "class_names": run.class_names,
            "method": run.config.method,
            "calibration": run.calibration.method if run.calibration else None,
            "longtail": run.record.versions["longtail"],
            "model": run.model_identity,
        }
        return cls(Deployed(model, *statistics(run.config.data)).eval(), shape, details)

    @property
    def preparation(self) -> str:
        """What has to be done to a picture first, for whoever exports."""
        return f"prepare pictures so: {self.details['preprocessing']}"

    def images(self, count: int) -> Tensor:
        """Random images, the same every time."""
        return torch.rand(count, *self.shape, generator=torch.Generator().manual_seed(count))

    def program(self) -> torch.export.ExportedProgram:
        """The traced network; the number of images stays free."""
        with torch.no_grad():
            batch = torch.export.Dim("batch")
            return torch.export.export(self.network, (self.images(2),), dynamic_shapes={"images": {0: batch}})

    def compare(self, other: Callable[[Tensor], Any], what: str) -> float:
        """The largest difference between the logits of a written network and ours; too large a one is an error."""
        largest = 0.0
        for count in CHECKED_BATCHES:
            images = self.images(count)
            with torch.no_grad():
                ours, theirs = self.network(images), torch.as_tensor(other(images))
            largest = max(largest, float((ours - theirs).abs().max()))
            if not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
                raise UserError(
                    f"the {what} gives other logits than torch for {count} images (by up to {largest:.1e}); "
                    "nothing was written: export it as torch-export or safetensors"
                )
        return largest


def _make_plain(model: nn.Module) -> None:
    """Weights that are computed anew in every pass, such as normalised class vectors, become fixed numbers."""
    for module in list(model.modules()):
        if is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                remove_parametrizations(module, name, leave_parametrized=True)
