"""The weighted cross-entropy of logits that are rescaled and shifted per class.

`a_ij = omega_j * z_ij + beta_j * norm_j` and `loss = sum_i u_i * (CE(a_i, y_i) + ridge / 2 * |x - centre|^2)`
with x = [omega, beta]: the ridge is as strong beside the cross-entropy whatever the weights sum to. It is convex in
x. Value, gradient and the 2x2 Hessian blocks are summed over chunks of rows that stay in the processor's cache. Large
problems are worked in float32 and summed in float64; small ones, where it costs nothing, in float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from longtail.data.imbalance import subsample_per_class
from longtail.distributed import SINGLE_PROCESS, World
from longtail.outputs.rows import LogitRows
from longtail.posthoc.solver import Problem
from longtail.posthoc.solver.lbfgs import Blocks

SMALL_PROBLEM = 1 << 22  # logits
SUBSAMPLING = 4  # a subsample has at most one row in this many
FEWEST_PER_CLASS = 3  # in a subsample, so that it represents every class
REFERENCE_CLASSES = 10
SMALLEST_SCALE = 1e-3  # lower bound of omega: below 0 the order of a class's logits would be reversed


def ridge_per_number(ridge: float, num_classes: int) -> float:
    """The ridge at K classes of a ridge stated for ten: each class has about 1 / K of the loss.

    >>> ridge_per_number(5e-4, 10), ridge_per_number(5e-4, 1000)
    (0.0005, 5e-06)
    """
    return ridge * REFERENCE_CLASSES / num_classes


def largest_subsample(class_counts: np.ndarray, rows: int) -> int:
    """The largest cap on the samples per class that leaves at most `rows` rows.

    >>> largest_subsample(np.array([100, 10, 2]), 20)
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
        self.norms = norms.double()
        self.relative_ridge = ridge
        self.centre = centre
        self.shifts = shifts
        self.world = world
        size, classes = rows.shape
        self.first, self.last = world.share(size)
        sums = torch.zeros(2, classes, dtype=torch.float64)
        for where in rows.slices(self.first, self.last):
            sums[0].index_add_(0, labels[where], sample_weights[where] * rows.of_labels(where, labels[where]))
            sums[1].index_add_(0, labels[where], sample_weights[where])
        self._set_up(sample_weights, sums, torch.float64 if size * classes <= SMALL_PROBLEM else torch.float32)

    def _set_up(self, sample_weights: Tensor, label_sums: Tensor, dtype: torch.dtype) -> None:
        """Set weights (N,), the terms (2, K) of the gradient that do not depend on x (true classes), and precision."""
        self.sample_weights, self._label_sums, self.dtype = sample_weights, label_sums, dtype
        self._weights = sample_weights.to(dtype)
        # Buffers for a chunk: its logits, the calibrated logits, p (1 - p).
        self._logits, self._work, self._terms = (self.rows.buffer(kind) for kind in (torch.float32, dtype, dtype))
        # Weights may sum to much less than 1: those of MARC to 0.003 at 1:1,000.
        self.ridge = self.relative_ridge * float(sample_weights.sum())
        by_scale, by_shift = self.world.sum(label_sums.clone()).abs()
        largest = float(torch.maximum(by_scale, by_shift * self.norms).max())
        self.unit = max(1.0, largest)
        # Of float32 sums over chunks; measured: up to eight units of the last digit.
        rounding = torch.finfo(torch.float32).eps * math.sqrt(self.rows.chunk_rows) / 4 * largest
        self.rounding = rounding if dtype == torch.float32 else 0.0

    def refine(self) -> bool:
        if self.dtype == torch.float64:
            return False
        self._set_up(self.sample_weights, self._label_sums, torch.float64)
        return True

    def weighing(self, factors: np.ndarray) -> AffineProblem:
        """The same problem if classes weigh `factors` (K,) times as much; costs no pass over the logits."""
        by_class, other = torch.from_numpy(factors), copy(self)
        other._set_up(self.sample_weights * by_class[self.labels], self._label_sums * by_class, self.dtype)
        return other

    def subsampled(self) -> AffineProblem | None:
        """At most so many rows of every class; the total weight of each class stays the same."""
        size, classes = self.rows.shape
        if size * classes <= SMALL_PROBLEM:
            return None
        labels = self.labels.numpy()
        most = largest_subsample(np.bincount(labels, minlength=classes), size // SUBSAMPLING)
        if most < FEWEST_PER_CLASS:
            return None
        chosen = subsample_per_class(labels, most, seed=0)
        kept_labels, weights = self.labels[chosen], self.sample_weights[chosen]
        whole, kept = (torch.zeros(classes, dtype=torch.float64) for _ in range(2))
        whole.index_add_(0, self.labels, self.sample_weights)
        kept.index_add_(0, kept_labels, weights)
        subsample = AffineProblem(
            self.rows.only(chosen),
            kept_labels,
            weights * torch.where(kept > 0, whole / kept, 1.0)[kept_labels],
            self.norms,
            ridge=self.relative_ridge,
            centre=self.centre,
            shifts=self.shifts,
            world=self.world,
        )
        subsample.share = self.share * len(chosen) / size
        return subsample

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        return self._pass([x])[0][0]

    def with_blocks(self, *points: np.ndarray) -> tuple[list[tuple[float, np.ndarray]], Blocks]:
        values, (bb, ab, aa) = self._pass(points, blocks=True)
        norms = self.norms.numpy()
        aa, ab, bb = aa + self.ridge, ab * norms, bb * norms**2 + self.ridge
        # A change of the logits by 1, on average over the samples that have curvature.
        reach = np.sqrt(bb) / norms
        if not self.shifts:
            return values, Blocks(aa, 0 * ab, 0 * bb + 1, reach)
        # A shift common to all classes does not change the softmax; only the ridge depends on it.
        common = np.concatenate([np.zeros(len(bb)), 1 / norms])
        return values, Blocks(aa, ab, bb, reach, common, self.ridge)

    def _pass(
        self, points: Sequence[np.ndarray], *, blocks: bool = False
    ) -> tuple[list[tuple[float, np.ndarray]], np.ndarray]:
        """Value and gradient (2K,) at each point; for the blocks at the last one, sums (3, K) of w p (1 - p) z^power.

        One pass over the rows for all points; the processes exchange all sums at once.
        """
        classes = self.rows.shape[1]
        totals = torch.zeros(len(points), 1 + (5 if blocks else 2) * classes, dtype=torch.float64)
        sums = totals[:, 1 : 1 + 2 * classes].unflatten(1, (2, classes))
        curvature = totals[-1, 1 + 2 * classes :].view(3 if blocks else 0, classes)
        sums -= self._label_sums
        for number, rows, logits, work in self._calibrate(points):
            highest = work.amax(1, keepdim=True)
            of_label = work.gather(1, self.labels[rows].unsqueeze(1))
            work.sub_(highest).exp_()
            total = work.sum(1)
            loss = total.double().log() + (highest - of_label).squeeze(1)
            totals[number, 0] += (self.sample_weights[rows] * loss).sum()
            weights = self._weights[rows]
            if blocks and number == len(points) - 1:
                term = torch.div(work, total.unsqueeze(1), out=self._terms[: len(work)])
                term.addcmul_(term, term, value=-1)
                for power in range(3):
                    term = term.mul_(logits) if power else term
                    curvature[power] += torch.mv(term.T, weights)
            weights = weights / total
            sums[number, 1] += torch.mv(work.T, weights)
            sums[number, 0] += torch.mv(work.mul_(logits).T, weights)
        self.world.sum(totals)
        sums[:, 1] *= self.norms
        results = []
        for x, value, slopes in zip(points, totals[:, 0], sums, strict=True):
            pull = x - self.centre
            gradient = slopes.flatten().numpy() + self.ridge * pull
            if not self.shifts:
                gradient[classes:] = 0.0
            results.append((float(value) + 0.5 * self.ridge * float(pull @ pull), gradient))
        return results, curvature.numpy()

    def _calibrate(self, points: Sequence[np.ndarray]) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """For each chunk and point: the number of the point, rows, their logits and the calibrated ones."""
        halves = [torch.from_numpy(x).double().chunk(2) for x in points]
        affine = [(omega.to(self.dtype), (beta * self.norms).to(self.dtype)) for omega, beta in halves]
        for rows, stored in self.rows.chunks(self.first, self.last, self._logits):
            logits = stored.to(self.dtype)
            for number, (scale, shift) in enumerate(affine):
                yield number, rows, logits, torch.addcmul(shift, logits, scale, out=self._work[: len(logits)])

    def gradients(self, x: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Gradients (G, 2K) at one point if classes weigh `factors` (G, K) times as much: one pass for all of them."""
        by_class = torch.from_numpy(factors)
        sums = -by_class.unsqueeze(1) * self._label_sums
        for _, rows, logits, work in self._calibrate([x]):
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
