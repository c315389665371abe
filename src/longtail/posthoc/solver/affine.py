"""The weighted cross-entropy of logits that are rescaled and shifted per class.

`a_ij = omega_j * z_ij + beta_j * norm_j` and `loss = sum_i u_i * (CE(a_i, y_i) + ridge / 2 * |x - centre|^2)`
with x = [omega, beta]: the ridge is as strong beside the cross-entropy whatever the weights sum to. It is convex in
x. Value, gradient and the 2x2 Hessian blocks are summed over chunks of rows that stay in the processor's cache. Large
problems are worked in float32 and summed in float64; small ones, where it costs nothing, in float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy

import numpy as np
import torch
from torch import Tensor

from longtail.data.imbalance import subsample_per_class
from longtail.distributed import SINGLE_PROCESS, World
from longtail.outputs.rows import LogitRows
from longtail.posthoc.solver import Problem
from longtail.posthoc.solver.curvature import Blocks

SMALL_PROBLEM = 1 << 22  # logits
SUBSAMPLING = 4  # a subsample has at most one row in this many
FEWEST_PER_CLASS = 3  # in a subsample, so that it represents every class

REFERENCE_CLASSES = 10


def ridge_per_number(ridge: float, num_classes: int) -> float:
    """The ridge at K classes of a ridge stated for ten: each class has about 1 / K of the loss.

    >>> ridge_per_number(5e-4, 10), ridge_per_number(5e-4, 1000)
    (0.0005, 5e-06)
    """
    return ridge * REFERENCE_CLASSES / num_classes


def _largest_subsample(class_counts: np.ndarray, rows: int) -> int:
    """The largest cap on the samples per class that leaves at most `rows` rows.

    >>> _largest_subsample(np.array([100, 10, 2]), 20)
    9
    """
    low, high = 0, int(class_counts.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(class_counts, middle).sum() <= rows:
            low = middle
        else:
            high = middle - 1
    return low


class _Space:
    """Buffers for a chunk, used again for each: its logits, the calibrated logits, terms of the curvature."""

    def __init__(self, rows: LogitRows, dtype: torch.dtype) -> None:
        self.logits = rows.buffer(torch.float32)
        self.work, self.bends = rows.buffer(dtype), rows.buffer(dtype)
        self.dtype = dtype


class AffineProblem(Problem):
    """The problem above; processes of `world` each sum over their share of the rows.

    Args:
        rows: logits (N, K).
        labels: (N,) int64.
        sample_weights: (N,) float64.
        norms: (K,) what beta is multiplied with.
        ridge: strength of the ridge, times the sum of the weights.
        centre: (2K,) where the ridge pulls to.
        shifts: whether beta is free; without, it stays where it is.
        world: processes that share the work.
    """

    paired = True

    def __init__(
        self,
        rows: LogitRows,
        labels: Tensor,
        sample_weights: Tensor,
        norms: Tensor,
        *,
        ridge: float,
        centre: np.ndarray,
        shifts: bool = True,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.rows = rows
        self.labels = labels
        self.sample_weights = sample_weights
        self.norms = norms.double()
        self.relative_ridge = ridge
        self.centre = centre
        self.shifts = shifts
        self.world = world
        size, classes = rows.shape
        self.first, self.last = world.share(size)
        self._targets = self._label_sums()
        self._work_in(torch.float64 if size * classes <= SMALL_PROBLEM else torch.float32)

    @property
    def ridge(self) -> float:
        """The ridge beside the weighted sum. Weights may sum to much less than 1: those of MARC to 0.003 at 1:1,000."""
        return self.relative_ridge * float(self.sample_weights.sum())

    def _work_in(self, dtype: torch.dtype) -> None:
        self._space = _Space(self.rows, dtype)
        self._weights = self.sample_weights.to(dtype)

    @property
    def rounding(self) -> float:
        """The rounding error of float32 sums over chunks; measured: up to eight units of the last digit."""
        if self._space.dtype == torch.float64:
            return 0.0
        return torch.finfo(torch.float32).eps * math.sqrt(self.rows.chunk_rows) / 4 * self._largest_sum()

    @property
    def unit(self) -> float:
        return max(1.0, self._largest_sum())

    def _largest_sum(self) -> float:
        by_scale, by_shift = self.world.sum(self._targets.clone()).abs()
        return float(torch.maximum(by_scale, by_shift * self.norms).max())

    def refine(self) -> bool:
        if self._space.dtype == torch.float64:
            return False
        self._work_in(torch.float64)
        return True

    def subsampled(self) -> AffineProblem | None:
        """At most so many rows of every class; the total weight of each class stays the same."""
        size, classes = self.rows.shape
        if size * classes <= SMALL_PROBLEM:
            return None
        labels = self.labels.numpy()
        counts = np.bincount(labels, minlength=classes)
        most = _largest_subsample(counts, size // SUBSAMPLING)
        if most < FEWEST_PER_CLASS:
            return None
        chosen = subsample_per_class(labels, most, seed=0)
        own, weights = self.labels[chosen], self.sample_weights[chosen]
        whole, kept = (torch.zeros(classes, dtype=torch.float64) for _ in range(2))
        whole.index_add_(0, self.labels, self.sample_weights)
        kept.index_add_(0, own, weights)
        part = AffineProblem(
            self.rows.only(chosen),
            own,
            weights * torch.where(kept > 0, whole / kept, 1.0)[own],
            self.norms,
            ridge=self.relative_ridge,
            centre=self.centre,
            shifts=self.shifts,
            world=self.world,
        )
        part.share = self.share * len(chosen) / size
        if part._space.dtype == self._space.dtype:
            part._space = self._space  # the two are never evaluated at the same time
        return part

    def _label_sums(self) -> Tensor:
        """The terms of the gradient that do not depend on x: those of the true classes."""
        sums = torch.zeros(2, self.rows.shape[1], dtype=torch.float64)
        for rows in self.rows.slices(self.first, self.last):
            labels, weights = self.labels[rows], self.sample_weights[rows]
            sums[0].index_add_(0, labels, weights * self.rows.of_labels(rows, labels))
            sums[1].index_add_(0, labels, weights)
        return sums

    def _calibrate(self, *points: np.ndarray) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """For each chunk and point: the number of the point, rows, their logits and the calibrated ones."""
        dtype = self._space.dtype
        halves = [torch.from_numpy(x).double().chunk(2) for x in points]
        affine = [(omega.to(dtype), (beta * self.norms).to(dtype)) for omega, beta in halves]
        for rows, stored in self.rows.chunks(self.first, self.last, self._space.logits):
            logits = stored.to(dtype)
            for number, (scale, shift) in enumerate(affine):
                yield number, rows, logits, torch.addcmul(shift, logits, scale, out=self._space.work[: len(logits)])

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = self._sums(x, blocks=False)[0]
        return value, gradient

    def with_blocks(self, x: np.ndarray) -> tuple[float, np.ndarray, Blocks]:
        return self._blocks(*self._sums(x, blocks=True)[0])

    def with_start(
        self, start: np.ndarray, x: np.ndarray
    ) -> tuple[tuple[float, np.ndarray], tuple[float, np.ndarray, Blocks]]:
        (value, gradient, _), there = self._sums(start, x, blocks=True)
        return (value, gradient), self._blocks(*there)

    def _blocks(self, value: float, gradient: np.ndarray, bends: np.ndarray) -> tuple[float, np.ndarray, Blocks]:
        bent, cross, steep = bends
        aa, bb = steep + self.ridge, bent + self.ridge
        if not self.shifts:
            return value, gradient, Blocks(aa, 0 * cross, 0 * bb + 1, np.sqrt(bb) / self.norms.numpy())
        # A shift common to all classes does not change the softmax; only the ridge depends on it.
        common = np.concatenate([np.zeros(len(bb)), 1 / self.norms.numpy()])
        # A change of the logits by 1, on average over the samples that bend the loss.
        reach = np.sqrt(bb) / self.norms.numpy()
        return value, gradient, Blocks(aa, cross, bb, reach, common, self.ridge)

    def weighing(self, factors: np.ndarray) -> AffineProblem:
        """The same problem if classes weigh `factors` (K,) times as much; costs no pass over the logits."""
        by_class, other = torch.from_numpy(factors), copy(self)
        other.sample_weights = self.sample_weights * by_class[self.labels]
        other._targets = self._targets * by_class
        other._weights = other.sample_weights.to(self._space.dtype)
        return other

    def gradients(self, x: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Gradients (G, 2K) at one point if classes weigh `factors` (G, K) times as much: one pass for all of them."""
        by_class = torch.from_numpy(factors)
        sums = -by_class.unsqueeze(1) * self._targets
        for _, rows, logits, work in self._calibrate(x):
            shares = work.softmax(1)
            weights = (by_class[:, self.labels[rows]] * self.sample_weights[rows]).to(work.dtype)
            sums[:, 1] += weights @ shares
            sums[:, 0] += weights @ shares.mul_(logits)
        self.world.sum(sums)
        sums[:, 1] *= self.norms
        total = torch.zeros(self.rows.shape[1], dtype=torch.float64).index_add_(0, self.labels, self.sample_weights)
        ridges = self.relative_ridge * (by_class @ total).unsqueeze(1).numpy()
        gradients = sums.flatten(1).numpy() + ridges * (x - self.centre)
        if not self.shifts:
            gradients[:, gradients.shape[1] // 2 :] = 0.0
        return np.asarray(gradients)

    def _sums(self, *points: np.ndarray, blocks: bool) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """At each point: value, gradient (2K,) and, if asked for, sums (3, K) of `w p (1 - p)` for the blocks.

        One pass for all points; the blocks are those of the last. The processes exchange all of it at once.
        """
        classes = self.rows.shape[1]
        totals = torch.zeros(len(points), 1 + (5 if blocks else 2) * classes, dtype=torch.float64)
        sums = totals[:, 1 : 1 + 2 * classes].unflatten(1, (2, classes))
        bent = totals[:, 1 + 2 * classes :].unflatten(1, (-1, classes))
        sums -= self._targets
        for number, rows, logits, work in self._calibrate(*points):
            highest = work.amax(1, keepdim=True)
            of_label = work.gather(1, self.labels[rows].unsqueeze(1))
            work.sub_(highest).exp_()
            total = work.sum(1)
            loss = total.double().log() + (highest - of_label).squeeze(1)
            totals[number, 0] += (self.sample_weights[rows] * loss).sum()
            weights = self._weights[rows]
            if blocks and number == len(points) - 1:
                probabilities = torch.div(work, total.unsqueeze(1), out=self._space.bends[: len(work)])
                self._add_bends(bent[number], probabilities, logits, weights)
            weights = weights / total
            sums[number, 1] += torch.mv(work.T, weights)
            sums[number, 0] += torch.mv(work.mul_(logits).T, weights)
        self.world.sum(totals)
        sums[:, 1] *= self.norms
        if blocks:
            bent[:, 0] *= self.norms**2
            bent[:, 1] *= self.norms
        return [self._with_ridge(x, *one) for x, *one in zip(points, totals[:, 0], sums, bent, strict=True)]

    def _with_ridge(
        self, x: np.ndarray, value: Tensor, sums: Tensor, bent: Tensor
    ) -> tuple[float, np.ndarray, np.ndarray]:
        pull = x - self.centre
        gradient = sums.flatten().numpy() + self.ridge * pull
        if not self.shifts:
            gradient[len(gradient) // 2 :] = 0.0
        return float(value) + 0.5 * self.ridge * float(pull @ pull), gradient, bent.numpy()

    @staticmethod
    def _add_bends(sums: Tensor, probabilities: Tensor, logits: Tensor, weights: Tensor) -> None:
        """Add the sums over rows of `w p (1 - p) z^power` for the powers 0, 1 and 2."""
        bend = probabilities.addcmul_(probabilities, probabilities, value=-1)
        for power in (0, 1, 2):
            sums[power] += torch.mv(bend.T, weights)
            if power < 2:
                bend.mul_(logits)
