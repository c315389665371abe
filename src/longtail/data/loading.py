"""Samplers, an endless stream of draws that is a pure function of the seed, and the batches that are read for it.

Epoch e of a sampler is a fixed list of as many indices as the data set has. The epochs are concatenated and then
split into batches, so every batch is full. Batch s is computed only from the seed and s, so a run can resume at any
step, and any number of processes can share one stream: process r takes the r-th shard of each batch.

| name | probability of class c |
|---|---|
| instance | n_c (every image once an epoch) |
| class-balanced | equal |
| square-root | sqrt(n_c) |
| progressive | (1 - t / T) times that of instance + t / T times that of class-balanced; t from 0 of T epochs |
| deferred | instance in the first half of the epochs, then class-balanced |
| reversed | 1 / n_c |
| oversample | equal; images of smaller classes are repeated up to the size of the largest, every image is used |
| undersample | equal; every class is reduced to the size of the smallest, no image is used twice |

Papers: Kang et al., Decoupling Representation and Classifier, ICLR 2020 (the first four);
Liu et al., OLTR, CVPR 2019 (deferred: its two stages in one run); Zhou et al., BBN, CVPR 2020 (reversed).
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longtail.data.augment import Transform
from longtail.data.images import Images, MemoryImages
from longtail.errors import UserError, choose
from longtail.launch import termination_signals

EXPONENTS = {"instance": 1.0, "class-balanced": 0.0, "square-root": 0.5, "reversed": -1.0}
SAMPLERS = (*EXPONENTS, "progressive", "deferred", "oversample", "undersample")


@dataclass(frozen=True)
class Draw:
    """One batch to read: the indices drawn, and the number of each draw in the whole stream, which fixes its views."""

    numbers: np.ndarray
    indices: np.ndarray


class Sampler:
    """The stream of draws over a labelled set.

    Args:
        labels: (N,) class of each image.
        name: one of `SAMPLERS`.
        seed: two samplers with one seed draw the same stream.
        epochs: length of training, for `progressive` and `deferred`.
    """

    def __init__(self, labels: np.ndarray, name: str = "instance", *, seed: int = 0, epochs: float = 1) -> None:
        self.name = choose("sampler", name, SAMPLERS)
        self.seed = seed
        self.epochs = epochs
        order = np.argsort(labels, kind="stable")
        _, counts = np.unique(labels, return_counts=True)
        self._members = np.split(order, np.cumsum(counts)[:-1])
        self._counts = counts
        self._size = len(labels)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    @property
    def epoch_length(self) -> int:
        """Draws in an epoch: the size of the data set, except for over- and under-sampling."""
        if self.name == "oversample":
            return int(self._counts.max()) * len(self._counts)
        if self.name == "undersample":
            return int(self._counts.min()) * len(self._counts)
        return self._size

    def class_probabilities(self, epoch: int) -> np.ndarray:
        """Probability of each class that is present, (classes present,)."""
        if self.name == "progressive":
            progress = min(epoch / self.epochs, 1.0)
            instance = self._counts / self._size
            return (1 - progress) * instance + progress / len(self._counts)
        weights = self._counts ** EXPONENTS.get(self._in_force(epoch), 0.0)
        return np.asarray(weights / weights.sum())

    def _in_force(self, epoch: int) -> str:
        """The sampler that draws an epoch."""
        if self.name != "deferred":
            return self.name
        return "instance" if epoch < max(round(self.epochs / 2), 1) else "class-balanced"

    def _draw_epoch(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, epoch))
        if self._in_force(epoch) == "instance":
            return rng.permutation(self._size)
        if self.name in ("oversample", "undersample"):
            size = self.epoch_length // len(self._counts)
            return rng.permutation(np.concatenate([_resize(members, size, rng) for members in self._members]))
        classes = rng.choice(len(self._counts), size=self._size, p=self.class_probabilities(epoch))
        within = (rng.random(self._size) * self._counts[classes]).astype(np.int64)
        starts = np.cumsum(self._counts) - self._counts
        return np.concatenate(self._members)[starts[classes] + within]

    def draws(self, first: int, count: int) -> Draw:
        """`count` draws of the stream from number `first` on."""
        pieces, number, left = [], first, count
        while left:
            epoch, position = divmod(number, self.epoch_length)
            piece = self._epoch(epoch)[position : position + left]
            pieces.append(piece)
            number += len(piece)
            left -= len(piece)
        return Draw(np.arange(first, first + count), np.concatenate(pieces))

    def batch(self, step: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Draw:
        """The shard of batch `step` for process `rank`; `batch_size` is the whole batch."""
        start = batch_size * rank // world_size
        stop = batch_size * (rank + 1) // world_size
        return self.draws(step * batch_size + start, stop - start)


def _resize(members: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` members: each equally often, the remainder without replacement."""
    whole, rest = divmod(size, len(members))
    return np.concatenate([np.tile(members, whole), rng.choice(members, size=rest, replace=False)])


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


def run_in_workers(work: Dataset[Any], keys: Iterable[Any], workers: int, *, pin: bool = False) -> Iterator[Any]:
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
            collate_fn=_unchanged,
            worker_init_fn=_outlive_signals,
        )
        results = iter(loader)
    for result in results:
        if isinstance(result, UserError):
            raise result
        yield result


def _unchanged(result: Any) -> Any:
    """Instead of torch's collation, which would make tensors of arrays."""
    return result


def _outlive_signals(worker: int) -> None:
    """In a worker: ignore signals to the whole process group, because the parent needs its workers until it has saved.

    `timeout` and schedulers send SIGTERM to every process of a group; a terminal sends Ctrl-C, and SIGHUP at its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        for number in termination_signals():
            signal.signal(number, lambda *_: signal.alarm(GRACE_SECONDS))
