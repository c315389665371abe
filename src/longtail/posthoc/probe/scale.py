"""One number after the head: how far its evidence is to be believed.

    logits = A (eta - log pi) + log q

eta are scores of a head fitted at the training prior pi, q is the target prior. A is fitted by likelihood on scores
of samples that the head has not seen, at the prior pi^(1/2), half-way between head and tail. Ridge heads are
under-confident, so A is above 1 as a rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World

SCALES = (0.02, 50.0)
USUAL_SCALE, SPREAD = 1.5, 0.5  # log A ~ N(log 1.5, 0.5^2): samples that are all classified correctly ask for any A


@dataclass(frozen=True)
class Evidence:
    """Scores of unseen samples without the training prior.

    Args:
        scores: (M, K) eta - log pi.
        labels: (M,) int64.
        counts: (K,) training samples.
    """

    scores: Tensor
    labels: Tensor
    counts: np.ndarray

    @property
    def log_prior(self) -> Tensor:
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(self.counts / self.counts.sum())).to(self.scores)

    def weights(self, power: float = 0.5) -> Tensor:
        """(M,) weights proportional to n^(-power), summing to 1: unseen samples as if drawn from pi^(1 - power)."""
        weights = torch.from_numpy(self.counts.astype(np.float64))[self.labels].pow(-power)
        return weights / weights.sum()

    def several(self) -> Evidence:
        """Without the classes of one sample, none of which can be unseen."""
        kept = torch.from_numpy(self.counts > 1)
        if bool(kept.all()):
            return self
        number = torch.cumsum(kept, 0) - 1
        return Evidence(self.scores[:, kept], number[self.labels], self.counts[self.counts > 1])

    def best_scale(self, world: World = SINGLE_PROCESS) -> tuple[float, float]:
        """A, and the weighted loss that it gives; the same in all processes."""
        evidence = self.several()
        weights, shift = evidence.weights(), 0.5 * evidence.log_prior
        one_sample = float(weights.square().sum())  # of the effective number

        def loss(log_scale: float) -> float:
            moved = torch.add(shift, evidence.scores, alpha=math.exp(log_scale))
            picked = moved.gather(1, evidence.labels.unsqueeze(1)).squeeze(1)
            unusual = ((log_scale - math.log(USUAL_SCALE)) / SPREAD) ** 2 / 2
            return float(weights @ (torch.logsumexp(moved, 1) - picked).double()) + one_sample * unusual

        bounds = tuple(math.log(scale) for scale in SCALES)
        found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-3})
        values = torch.tensor([math.exp(found.x), float(found.fun)], dtype=torch.float64)
        world.broadcast([values])  # rounding must not let processes decide differently
        return float(values[0]), float(values[1])
