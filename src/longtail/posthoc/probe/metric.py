"""The metric of the ridge, and coordinates in which a head with this ridge is quick to fit.

    M_s = (1 - s) S + s T,    T = tr(S) / D I, or the diagonal of S for features of different units

S is the covariance within classes, every class with the same weight. With L L' = M_s and L^-1 C L'^-1 = Q E Q' for
the total covariance C, a head W = V R' with R = L'^-1 Q has the penalty tr(W M_s W') = |V|^2, and the curvature of
the cross-entropy in the coordinates V is nearly diagonal: proportional to E.

With fewer samples than features, S = F F' and C = G G' for thin F and G. The best head is in the span of M_s^-1 times
the centred samples, which has a basis B in the units of T: all of the above takes place in its few coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import cholesky, eigh, qr, solve_triangular
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.posthoc.probe.inputs import Rows

NOTHING = 1e-12
WIDEST = 4096  # features with a full covariance; of more, and of sparse ones, the variances are used


@dataclass(frozen=True)
class Metric:
    """Shrinkage s between 0 and 1, towards one variance for all features, or (`scaled`) towards each one's variance."""

    shrinkage: float
    scaled: bool = False

    def __str__(self) -> str:
        return f"{self.shrinkage:g}{' of scaled features' if self.scaled else ''}"


@dataclass(frozen=True)
class Statistics:
    """Moments of features (N, D) with K classes, in float64.

    Args:
        centre: (D,) mean of all samples.
        within: (D, D) covariance within classes, every class with the same weight; or its diagonal (D,); or F (D, N).
        total: (D, D) covariance of all samples; or its diagonal (D,); or G (D, N).
        thin: whether they are F and G.
    """

    centre: Tensor
    within: np.ndarray
    total: np.ndarray
    thin: bool = False

    @property
    def diagonal(self) -> bool:
        return self.within.ndim == 1


def statistics(rows: Rows, labels: Tensor, num_classes: int) -> Statistics:
    """Moments of rows with labels (N,), from two reads of the features by the processes that share them."""
    counts = torch.bincount(labels, minlength=num_classes).double()
    means = _class_means(rows, labels, counts)
    weights = (1 / (counts * (counts > 0).sum())).nan_to_num(posinf=0.0)[labels]
    centre = (counts / counts.sum()) @ means
    if not rows.sparse and len(rows) < rows.width and len(rows) <= WIDEST:
        samples = np.concatenate([np.asarray(chunk, dtype=np.float64) for _, chunk in rows.raw()])
        residual = (samples - means[labels].numpy()) * weights.sqrt().unsqueeze(1).numpy()
        return Statistics(centre, residual.T, (samples - centre.numpy()).T / np.sqrt(len(samples)), thin=True)
    between = means - centre
    if rows.sparse or rows.width > WIDEST:
        within, total = _variances(rows, labels, means, weights)
    else:
        within, total = _covariances(rows, labels, means, weights)
    scaled = between * (counts / counts.sum()).sqrt().unsqueeze(1)
    total = total + (scaled.square().sum(0) if total.ndim == 1 else scaled.T @ scaled)
    return Statistics(centre, within.numpy(), total.numpy())


def _class_means(rows: Rows, labels: Tensor, counts: Tensor) -> Tensor:
    sums = torch.zeros(len(counts), rows.width, dtype=torch.float64)
    for where, chunk in rows.raw(shared=True):
        own = labels[where]
        if rows.sparse:
            picks = torch.nn.functional.one_hot(own, len(counts)).double().numpy()
            sums += torch.from_numpy(chunk.T @ picks).T
        else:
            sums.index_add_(0, own, torch.from_numpy(np.array(chunk, dtype=np.float64)))
    return rows.world.sum(sums) / counts.clamp(min=1).unsqueeze(1)


def _covariances(rows: Rows, labels: Tensor, means: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Within classes: every class with the same weight, and every sample with the same weight."""
    within, pooled = (torch.zeros(rows.width, rows.width, dtype=torch.float64) for _ in range(2))
    for where, chunk in rows.dense(torch.zeros(rows.width), shared=True):
        residual = chunk - means[labels[where]].to(chunk)
        within += (residual * weights[where].to(chunk).unsqueeze(1)).T @ residual
        pooled += residual.T @ residual
    return rows.world.sum(within), rows.world.sum(pooled) / len(labels)


def _variances(rows: Rows, labels: Tensor, means: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    within, pooled = (torch.zeros(rows.width, dtype=torch.float64) for _ in range(2))
    for where, chunk in rows.raw(shared=True):
        weight = weights[where]
        if rows.sparse:
            squares = chunk.multiply(chunk).T
            within += torch.from_numpy(squares @ weight.numpy())
            pooled += torch.from_numpy(squares @ np.ones(len(weight)))
        else:
            residual = torch.from_numpy(np.array(chunk, dtype=np.float64)) - means[labels[where]]
            within += weight @ residual.square()
            pooled += residual.square().sum(0)
    rows.world.sum(within), rows.world.sum(pooled)
    if rows.sparse:
        counts = torch.bincount(labels, minlength=len(means)).double()
        within -= (means.square() * ((counts > 0) / (counts > 0).sum()).unsqueeze(1)).sum(0)
        pooled -= counts @ means.square()
    return within.clamp(min=0), pooled.clamp(min=0) / len(labels)


class Coordinates:
    """Coordinates V (K, D) of heads W = V R' on centred features, for one metric.

    Args:
        moments: of the features.
        metric: shrinkage s above.
        dtype: of V and W.
        world: processes that take the same coordinates, whatever the rounding of their eigenvectors.
    """

    def __init__(self, moments: Statistics, metric: Metric, dtype: torch.dtype, world: World = SINGLE_PROCESS) -> None:
        self.centre = moments.centre.to(dtype)
        within, total = moments.within, moments.total
        if moments.diagonal:
            values = (1 - metric.shrinkage) * within + metric.shrinkage * _target(
                within, total, moments.centre.numpy(), metric
            )
            self.root = torch.from_numpy(np.sqrt(values)).to(dtype)
            self.curvature = torch.from_numpy(total / values).to(dtype)
            self.rotation = None
            return
        if moments.thin:
            spread, spread_in_all = (np.square(factor).sum(1) for factor in (within, total))
            target = _target(spread, spread_in_all, moments.centre.numpy(), metric)
            units = np.sqrt(metric.shrinkage * target)[:, None]
            basis = qr(total / units, mode="economic")[0]
            inside, outside = (basis.T @ (factor / units) for factor in (within, total))
            matrix = (1 - metric.shrinkage) * inside @ inside.T + np.eye(len(inside))
            curvature, rotation = _whitened(matrix, outside @ outside.T)
            rotation = basis @ rotation / units
        else:
            target = _target(np.diag(within), np.diag(total), moments.centre.numpy(), metric)
            matrix = (1 - metric.shrinkage) * within + metric.shrinkage * np.diag(target)
            curvature, rotation = _whitened(matrix, total)
        self.curvature, self.rotation = (torch.from_numpy(values).to(dtype) for values in (curvature, rotation))
        world.broadcast([self.curvature, self.rotation])

    def weight(self, coordinates: Tensor) -> Tensor:
        """W (K, D) of coordinates V (K, D)."""
        return coordinates / self.root if self.rotation is None else coordinates @ self.rotation.T

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient by V (K, D) of a gradient by W (K, D)."""
        return gradient / self.root if self.rotation is None else gradient @ self.rotation

    def of_weight(self, weight: Tensor) -> Tensor:
        """V (K, D) of W (K, D)."""
        if self.rotation is None:
            return weight * self.root
        if len(self.rotation) > len(self.curvature):
            return torch.linalg.lstsq(self.rotation, weight.T).solution.T
        return torch.linalg.solve(self.rotation, weight.T).T


def _whitened(metric: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E (R,) and R (R, R) that make both matrices (R, R) diagonal: the metric becomes the identity, the total E."""
    lower = cholesky(metric, lower=True, overwrite_a=True)
    half = solve_triangular(lower, total, lower=True).T
    whitened = solve_triangular(lower, half, lower=True, overwrite_b=True)
    eigenvalues, vectors = eigh(whitened, driver="evr", overwrite_a=True)
    return np.maximum(eigenvalues, 0), solve_triangular(lower, vectors, lower=True, trans="T", overwrite_b=True)


def _target(within: np.ndarray, total: np.ndarray, centre: np.ndarray, metric: Metric) -> np.ndarray:
    """T (D,) from variances (D,) within classes and of all samples, and the centre (D,); positive."""
    mean = within.mean()
    if mean <= NOTHING * total.mean() or mean == 0:  # no spread within classes: one variance for all
        return np.full(len(within), total.mean() or 1.0)
    if not metric.scaled:
        return np.full(len(within), mean)
    varies = within > NOTHING * (total + centre**2)  # less is rounding: the feature is constant
    return np.where(varies, within, within.max())
