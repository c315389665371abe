"""Held-out samples as HALO's fit sees them: their scores, and what each of them counts for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

BLOCK = 1 << 17  # scores of one head worked on at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Held:
    """Some held-out samples as the fit sees them.

    Args:
        labels: (B,) among the classes that are present.
        weights: (B,) float64.
        scores: (S, K, B) what is mixed, minus the score of the sample's own class.
    """

    labels: Tensor
    weights: Tensor
    scores: Tensor

    @classmethod
    def of(cls, labels: Tensor, weights: Tensor, scores: Tensor) -> Self:
        """Of scores (S, K, B) by the model and by other heads: of these the difference from the model is mixed."""
        scores = scores - scores.gather(1, labels.expand(len(scores), 1, -1))
        scores[1:] -= scores[0].clone()
        return cls(labels, weights, scores.contiguous())

    def blocks(self) -> Iterable[Held]:
        """The samples, some at a time."""
        size = max(BLOCK // self.scores.shape[1], 1)
        if len(self.labels) <= size:
            return [self]
        return [self.taken(slice(start, start + size)) for start in range(0, len(self.labels), size)]

    def taken(self, samples: slice | Tensor) -> Held:
        """Some of the samples."""
        return Held(self.labels[samples], self.weights[samples], self.scores[:, :, samples].contiguous())


def sample_weights(labels: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """(M,) weights of held-out samples, summing to their effective number.

    They make the fit a posterior at the prior pi^(1/2), half-way between the training set and balance: w is
    proportional to n^(-1/2) where the samples are distributed like training, in general to n^(1/2) / m with m
    their own counts.
    """
    own = np.bincount(labels, minlength=len(class_counts))
    counts = class_counts.astype(np.float64)
    of_class = counts**-0.5 if like_training(own, counts) else np.sqrt(counts) / np.maximum(own, 1)
    return to_effective_number(of_class[labels])


def to_effective_number(weights: np.ndarray) -> np.ndarray:
    """(M,) weights scaled to sum to the number of equal samples that would tell as much.

    >>> to_effective_number(np.array([2.0, 2.0])).tolist()
    [1.0, 1.0]
    """
    return np.asarray(weights * (weights.sum() / np.square(weights).sum()))


def like_training(own: np.ndarray, class_counts: np.ndarray) -> bool:
    """Whether counts look like a draw from training images: no class is off by more than chance and rounding.

    >>> counts = np.array([200, 80, 5])
    >>> like_training(np.array([20, 8, 1]), counts), like_training(np.full(3, 9), counts)
    (True, False)
    """
    present = own > 0
    expected = class_counts[present] * own.sum() / class_counts[present].sum()
    # A split that leaves every class at least one image is off by up to one image per class.
    off = np.maximum(np.abs(own[present] - expected) - 1, 0)
    return bool((np.square(off) / expected).sum() <= 3 * present.sum())
