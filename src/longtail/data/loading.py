"""From a plan of draws to batches on a device, read here or in worker processes."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longtail.data.augment import Transform
from longtail.data.images import DecodedImages, Images, MemoryImages
from longtail.data.samplers import Draw


@dataclass
class Batch:
    """Normalised images (B, C, H, W), labels (B,), and where in the set they stand (B,)."""

    images: Tensor
    labels: Tensor
    indices: Tensor


Drawn = tuple[Tensor, Tensor, Tensor]  # augmented uint8 pixels, labels, indices

# Images in memory that are augmented together: an operation on one image takes as long as on ten.
TOGETHER = 512
GRACE_SECONDS = 120  # that a worker lives on after SIGTERM


class _DrawnBatches(Dataset[Drawn]):
    """A map from draws to augmented batches; what a worker process runs."""

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __getitem__(self, draw: Draw) -> Drawn:
        return self._read(draw.indices, self._numbers(draw))

    def several(self, plan: Iterable[Draw]) -> Iterator[Drawn]:
        """The same batches, some of them augmented at a time; for images that are never broken."""
        for draws in _groups(plan):
            numbers = np.concatenate([self._numbers(draw) for draw in draws])
            read = self._read(np.concatenate([draw.indices for draw in draws]), numbers)
            sizes = [len(draw.indices) for draw in draws]
            yield from zip(*(tensor.split(sizes) for tensor in read), strict=True)

    def _numbers(self, draw: Draw) -> np.ndarray:
        return self.transform.numbers(draw.first, len(draw.indices))

    def _read(self, indices: np.ndarray, numbers: np.ndarray) -> Drawn:
        decode = self.transform.decode
        split = decode.columns if decode else 0
        pixels, kept = self.images.read(indices, decode, numbers[:, :split])
        pixels = self.transform.augment(pixels, torch.from_numpy(numbers[kept][:, split:]))
        places = torch.from_numpy(indices[kept])
        return pixels, self.images.labels[places], places


def _outlive_signals(number: int) -> None:
    """In a worker: a signal to the whole group is for the parent, who needs its workers until it has saved.

    `timeout` and schedulers send SIGTERM to every process of a group, a terminal sends Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(GRACE_SECONDS)


def _groups(plan: Iterable[Draw]) -> Iterator[list[Draw]]:
    """Draws in their order, as many at a time as make `TOGETHER` images."""
    group: list[Draw] = []
    for draw in plan:
        group.append(draw)
        if sum(len(drawn.indices) for drawn in group) >= TOGETHER:
            yield group
            group = []
    if group:
        yield group


def load(
    images: Images, transform: Transform, plan: Iterable[Draw], *, workers: int = 0, device: torch.device | None = None
) -> Iterator[Batch]:
    """Yield the batches of a plan in its order.

    Images in memory are augmented on the device they lie on; files are decoded and augmented in
    `workers` processes (0: in this one).
    """
    device = device or torch.device("cpu")
    drawn = _DrawnBatches(images, transform)
    source: Iterable[Drawn]
    if isinstance(images, DecodedImages):
        source = DataLoader(
            drawn,
            batch_size=None,
            sampler=plan,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=_outlive_signals,
        )
    else:
        source = drawn.several(plan)
    for pixels, labels, indices in source:
        moved = pixels.to(device, non_blocking=True)
        yield Batch(transform.normalise(moved), labels.to(device, non_blocking=True), indices)


def in_order(size: int, batch_size: int, *, first: int = 0, rank: int = 0, world_size: int = 1) -> list[Draw]:
    """Every image once: whole batches, dealt out to the processes in turn.

    `first` is the number of the first draw: a later augmented pass starts where the last ended.
    """
    starts = range(rank * batch_size, size, world_size * batch_size)
    return [Draw(first + start, np.arange(start, min(start + batch_size, size))) for start in starts]


def resident(images: Images, device: torch.device) -> Images:
    """Move images that fit in memory to the device once; files stay where they are."""
    return images.to(device) if isinstance(images, MemoryImages) else images
