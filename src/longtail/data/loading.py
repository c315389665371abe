"""From a list of draws to batches on a device, read in this process or in worker processes."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longtail.data.augment import Transform
from longtail.data.images import Images, MemoryImages
from longtail.data.samplers import Draw
from longtail.errors import UserError
from longtail.launch import terminations

GRACE_SECONDS = 120  # that a worker process lives on after SIGTERM
PIXELS_AT_ONCE = 512 * 32 * 32  # that are augmented together: an operation on one small image takes as long as on ten


@dataclass
class Batch:
    """Normalised images (B, C, H, W), labels (B,) or soft targets (B, K), and indices in the data set (B,)."""

    images: Tensor
    labels: Tensor
    indices: Tensor


Drawn = tuple[Tensor, Tensor, Tensor]  # augmented uint8 pixels, labels, indices


class _DrawnBatches(Dataset[Drawn]):
    """Turns draws into augmented batches; worker processes run it."""

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __getitem__(self, draw: Draw) -> Drawn | UserError:  # type: ignore[override]
        try:
            return self._read([draw])[:3]
        except UserError as error:
            return error  # as a value: raised in a worker process it would come back as a traceback

    def several(self, plan: Iterable[Draw]) -> Iterator[Drawn]:
        """The same batches; several are augmented together."""
        for draws in self._groups(plan):
            *tensors, kept = self._read(draws)
            ends = np.cumsum([len(draw.indices) for draw in draws])
            sizes = np.diff(np.searchsorted(kept, [0, *ends])).tolist()  # without the broken images that were skipped
            for draw, size in zip(draws, sizes, strict=True):
                if size == 0 < len(draw.indices):
                    raise UserError(f"none of the {len(draw.indices)} images of a batch can be read")
            yield from zip(*(tensor.split(sizes) for tensor in tensors), strict=True)

    def _groups(self, plan: Iterable[Draw]) -> Iterator[list[Draw]]:
        """Groups of draws in order, each with up to `PIXELS_AT_ONCE` pixels."""
        decode, images = self.transform.decode, self.images
        area = decode.size**2 if decode else images.pixels[0, 0].numel() if isinstance(images, MemoryImages) else 1
        group: list[Draw] = []
        for draw in plan:
            group.append(draw)
            if sum(len(drawn.indices) for drawn in group) * area >= PIXELS_AT_ONCE:
                yield group
                group = []
        if group:
            yield group

    def _read(self, draws: list[Draw]) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
        """Augmented pixels, labels and indices of all draws, and the position of each image among the draws."""
        numbers = np.concatenate([self.transform.numbers(draw.numbers) for draw in draws])
        indices = np.concatenate([draw.indices for draw in draws])
        decode = self.transform.decode
        split = decode.columns if decode else 0
        pixels, kept = self.images.read(indices, decode, numbers[:, :split])
        pixels = self.transform.augment(pixels, torch.from_numpy(numbers[kept][:, split:]))
        rows = torch.from_numpy(indices[kept])
        return pixels, self.images.labels[rows], rows, kept


def load(
    images: Images, transform: Transform, plan: Iterable[Draw], *, workers: int = 0, device: torch.device | None = None
) -> Iterator[Batch]:
    """Yield the batches of a plan in its order.

    Images in memory, or decoded before, are augmented in this process, on their device; others are decoded and
    augmented in `workers` processes (0: in this one).
    """
    device = device or torch.device("cpu")
    drawn = _DrawnBatches(images, transform)
    pin = device.type == "cuda"
    source = run_in_workers(drawn, plan, workers, pin=pin) if images.needs_workers else drawn.several(plan)
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


@contextmanager
def quiet_about_workers() -> Iterator[None]:
    """Without torch's warning about more workers than cores: they are useful when files are slow to read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


def run_in_workers(
    work: Dataset[Any],
    keys: Iterable[Any],
    workers: int,
    *,
    pin: bool = False,
    collate: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """`work[key]` for every key, computed by `workers` processes (0: by this one).

    `work` returns a `UserError` as a value, which is raised here: raised in a worker it would come back as a traceback.
    """
    with quiet_about_workers():
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            pin_memory=pin,
            collate_fn=collate,
            worker_init_fn=_outlive_signals,
        )
        results = iter(loader)
    for result in results:
        if isinstance(result, UserError):
            raise result
        yield result


def _outlive_signals(number: int) -> None:
    """In a worker: ignore signals to the whole process group, because the parent needs its workers until it has saved.

    `timeout` and schedulers send SIGTERM to every process of a group; a terminal sends Ctrl-C, and SIGHUP at its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        for ending in terminations():
            signal.signal(ending, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(GRACE_SECONDS)
