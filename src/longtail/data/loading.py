"""From a list of draws to batches on a device, read in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtail.core.progress import QUIET, Display
from longtail.data.augment import Transform
from longtail.data.decoded import StoredImages, decoded_once
from longtail.data.images import DecodedImages, FileImages, Images, MemoryImages, require_readable
from longtail.data.samplers import Draw
from longtail.data.worker_processes import in_order_of
from longtail.errors import UserError


@dataclass
class Batch:
    """Normalised images (B, C, H, W), labels (B,), and indices in the data set (B,)."""

    images: Tensor
    labels: Tensor
    indices: Tensor


Drawn = tuple[Tensor, Tensor, Tensor]  # augmented uint8 pixels, labels, indices

# Pixels that are augmented together: an operation on one small image takes as long as on ten.
TOGETHER = 512 * 32 * 32


class _DrawnBatches(Dataset[Drawn]):
    """Turns draws into augmented batches; worker processes run it."""

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __getitem__(self, draw: Draw) -> Drawn | UserError:  # type: ignore[override]
        try:
            return self._read(draw.indices, self._numbers(draw))
        except UserError as error:
            return error  # as a value: raised in a worker process it would come back as a traceback

    def several(self, plan: Iterable[Draw]) -> Iterator[Drawn]:
        """The same batches; several are augmented together."""
        for draws in self._groups(plan):
            numbers = np.concatenate([self._numbers(draw) for draw in draws])
            indices = np.concatenate([draw.indices for draw in draws])
            *read, kept = self._read_kept(indices, numbers)
            ends = np.cumsum([len(draw.indices) for draw in draws])
            sizes = np.diff(np.searchsorted(kept, [0, *ends])).tolist()  # without the broken images that were skipped
            for draw, size in zip(draws, sizes, strict=True):
                if size == 0 < len(draw.indices):
                    raise UserError(f"none of the {len(draw.indices)} images of a batch can be read")
            yield from zip(*(tensor.split(sizes) for tensor in read), strict=True)

    def _groups(self, plan: Iterable[Draw]) -> Iterator[list[Draw]]:
        """Groups of draws in order, each with up to `TOGETHER` pixels."""
        decode, images = self.transform.decode, self.images
        area = images.pixels[0, 0].numel() if isinstance(images, MemoryImages) else decode.size**2 if decode else 1
        group: list[Draw] = []
        for draw in plan:
            group.append(draw)
            if sum(len(drawn.indices) for drawn in group) * area >= TOGETHER:
                yield group
                group = []
        if group:
            yield group

    def _numbers(self, draw: Draw) -> np.ndarray:
        return self.transform.numbers(draw.numbers)

    def _read(self, indices: np.ndarray, numbers: np.ndarray) -> Drawn:
        return self._read_kept(indices, numbers)[:3]

    def _read_kept(self, indices: np.ndarray, numbers: np.ndarray) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
        """A batch, and the position in `indices` of each image."""
        decode = self.transform.decode
        split = decode.columns if decode else 0
        pixels, kept = self.images.read(indices, decode, numbers[:, :split])
        pixels = self.transform.augment(pixels, torch.from_numpy(numbers[kept][:, split:]))
        places = torch.from_numpy(indices[kept])
        return pixels, self.images.labels[places], places, kept


def load(
    images: Images, transform: Transform, plan: Iterable[Draw], *, workers: int = 0, device: torch.device | None = None
) -> Iterator[Batch]:
    """Yield the batches of a plan in its order.

    Images in memory, or decoded before, are augmented in this process, on their device; others are decoded and
    augmented in `workers` processes (0: in this one).
    """
    device = device or torch.device("cpu")
    drawn = _DrawnBatches(images, transform)
    decodes = isinstance(images, DecodedImages) or (isinstance(images, StoredImages) and not images.finished)
    source = in_order_of(drawn, plan, workers, pin=device.type == "cuda") if decodes else drawn.several(plan)
    for pixels, labels, indices in source:
        moved = pixels.to(device, non_blocking=True)
        yield Batch(transform.normalise(moved), labels.to(device, non_blocking=True), indices)


def in_order(
    size: int, batch_size: int, *, numbers: np.ndarray | None = None, rank: int = 0, world_size: int = 1
) -> list[Draw]:
    """Every image once, in batches that are divided among the processes in turn.

    `numbers` (size,) are those of the draws, if not 0, 1, 2 and so on.
    """
    indices = np.arange(size)
    numbers = indices if numbers is None else numbers
    batches = [slice(start, start + batch_size) for start in range(rank * batch_size, size, world_size * batch_size)]
    return [Draw(numbers[batch], indices[batch]) for batch in batches]


def resident(
    images: Images,
    transform: Transform,
    device: torch.device,
    *,
    cache_gb: float = 0.0,
    workers: int = 0,
    display: Display = QUIET,
) -> Images:
    """Move images to where they are read fastest: memory of the device, or decoded once in the cache folder."""
    if isinstance(images, MemoryImages):
        return images.to(device)
    stored = decoded_once(images, transform.decode, most_bytes=cache_gb * 1e9, workers=workers, display=display)
    if isinstance(stored, FileImages):  # not decoded now, but which files exist is known at once
        require_readable(stored, stored.missing())
    return stored
