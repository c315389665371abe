"""Means of each class and the covariance within classes, from two reads of the features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.outputs.checks import Array
from longtail.outputs.rows import LogitRows

SHRINKAGE = 0.1


@dataclass(frozen=True)
class ClassStatistics:
    """What is known of features (N, D) with K classes, in float64.

    Args:
        means: (K, D).
        covariance: (D, D) within classes, every class with the same weight, shrunk towards a multiple of the identity.
    """

    means: np.ndarray
    covariance: np.ndarray

    @property
    def centre(self) -> np.ndarray:
        """(D,) mean of the class means."""
        return np.asarray(self.means.mean(0))

    def second_moments(self) -> np.ndarray:
        """(D + 1, D + 1) of [features - centre, 1], every class with the same weight."""
        between = self.means - self.centre
        moments = np.zeros((len(self.centre) + 1,) * 2)
        moments[:-1, :-1] = self.covariance + between.T @ between / len(between)
        moments[-1, -1] = 1.0
        return moments


def class_statistics(
    features: Array, labels: Tensor, num_classes: int, world: World = SINGLE_PROCESS
) -> ClassStatistics:
    """Means and covariance of features (N, D); the processes of `world` each read their share, twice.

    The covariance is `(1 - s) S + s tr(S) / D I` with s = 0.1, where S weighs a sample by 1 / n_c.
    """
    rows = LogitRows(features)
    size, width = rows.shape
    first, last = world.share(size)
    counts = torch.bincount(labels, minlength=num_classes).double()
    sums = torch.zeros(num_classes, width, dtype=torch.float64)
    for where, chunk in rows.chunks(first, last):
        sums.index_add_(0, labels[where], chunk.double())
    means = world.sum(sums) / counts.unsqueeze(1)
    scatter = torch.zeros(width, width, dtype=torch.float64)
    weights = 1 / (num_classes * counts)
    for where, chunk in rows.chunks(first, last):
        own = labels[where]
        residual = chunk.double() - means[own]
        scatter.addmm_((residual * weights[own].unsqueeze(1)).T, residual)
    covariance = world.sum(scatter).numpy()
    spread = float(np.trace(covariance)) / width
    # Features that do not vary within classes have no metric of their own: the plain one serves.
    plain = (SHRINKAGE * spread if spread > 0 else 1.0) * np.eye(width)
    return ClassStatistics(means.numpy(), (1 - SHRINKAGE) * covariance + plain)
