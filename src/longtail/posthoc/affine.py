"""The weighted cross-entropy of logits that are rescaled and shifted per class.

`a_ij = omega_j * z_ij + beta_j * norm_j` and `loss = sum_i u_i * CE(a_i, y_i) + ridge / 2 * |x - centre|^2`
with x = [omega, beta]. It is convex in x. Value, gradient and the 2x2 Hessian blocks are summed
over chunks of rows that stay in the processor's cache. Large problems are worked in float32 and
summed in float64; small ones, where it costs nothing, in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.outputs.rows import LogitRows
from longtail.posthoc.solver import Problem

SMALL_PROBLEM = 1 << 22  # logits


REFERENCE_CLASSES = 10


def ridge_per_number(ridge: float, num_classes: int) -> float:
    """What a ridge stated for ten classes is for each number at K classes, whose share of the loss is about 1 / K.

    >>> ridge_per_number(5e-4, 10), ridge_per_number(5e-4, 1000)
    (0.0005, 5e-06)
    """
    return ridge * REFERENCE_CLASSES / num_classes


class AffineProblem(Problem):
    """The problem above; processes of `world` each sum over their share of the rows.

    Args:
        rows: logits (N, K).
        labels: (N,) int64.
        sample_weights: (N,) float64, summing to about 1.
        norms: (K,) what beta is multiplied with.
        ridge: strength of the ridge.
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
        self.ridge = ridge
        self.centre = centre
        self.shifts = shifts
        self.world = world
        size, classes = rows.shape
        self.first, self.last = world.share(size)
        self._targets = self._label_sums()
        self._work_in(torch.float64 if size * classes <= SMALL_PROBLEM else torch.float32)

    def _work_in(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(self.rows.chunk_rows, self.rows.shape[1], dtype=dtype)
        self._weights = self.sample_weights.to(dtype)

    def refine(self) -> bool:
        if self._buffer.dtype == torch.float64:
            return False
        self._work_in(torch.float64)
        return True

    def _label_sums(self) -> Tensor:
        """The part of the gradient that does not depend on x: minus what the true classes pull."""
        sums = torch.zeros(2, self.rows.shape[1], dtype=torch.float64)
        for rows in self.rows.slices(self.first, self.last):
            labels, weights = self.labels[rows], self.sample_weights[rows]
            sums[0].index_add_(0, labels, weights * self.rows.of_labels(rows, labels))
            sums[1].index_add_(0, labels, weights)
        return sums

    def _calibrate(self, x: np.ndarray) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their logits and, in a buffer, the calibrated ones."""
        dtype = self._buffer.dtype
        omega, beta = torch.from_numpy(x).double().chunk(2)
        scale, shift = omega.to(dtype), (beta * self.norms).to(dtype)
        for rows, stored in self.rows.chunks(self.first, self.last):
            logits = stored.to(dtype)
            calibrated = torch.addcmul(shift, logits, scale, out=self._buffer[: len(logits)])
            yield rows, logits, calibrated

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        totals = torch.zeros(1 + self._targets.numel(), dtype=torch.float64)  # one exchange between processes
        value, sums = totals[:1], totals[1:].view_as(self._targets)
        sums -= self._targets
        for rows, logits, work in self._calibrate(x):
            highest = work.amax(1, keepdim=True)
            own = work.gather(1, self.labels[rows].unsqueeze(1))
            work.sub_(highest).exp_()
            total = work.sum(1)
            value += (self.sample_weights[rows] * (total.double().log() + (highest - own).squeeze(1))).sum()
            weights = self._weights[rows] / total
            sums[1] += torch.mv(work.T, weights)
            sums[0] += torch.mv(work.mul_(logits).T, weights)
        sums[1] *= self.norms
        self.world.sum(totals)
        pull = x - self.centre
        gradient = sums.flatten().numpy() + self.ridge * pull
        if not self.shifts:
            gradient[len(gradient) // 2 :] = 0.0
        return float(value) + 0.5 * self.ridge * float(pull @ pull), gradient

    def blocks(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sums = torch.zeros(3, self.rows.shape[1], dtype=torch.float64)
        for rows, logits, work in self._calibrate(x):
            work.sub_(work.logsumexp(1, keepdim=True)).exp_()
            work.addcmul_(work, work, value=-1)  # p (1 - p)
            for power in (0, 1, 2):
                sums[power] += torch.mv(work.T, self._weights[rows])
                if power < 2:
                    work.mul_(logits)
        sums[1] *= self.norms
        sums[0] *= self.norms**2
        self.world.sum(sums)
        bb, ab, aa = sums.numpy()
        if not self.shifts:
            return aa + self.ridge, 0 * ab, 0 * bb + 1
        return aa + self.ridge, ab, bb + self.ridge
