"""Samplers: the order of the images, an endless stream of draws that is a pure function of the seed.

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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longtail.errors import choose

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
