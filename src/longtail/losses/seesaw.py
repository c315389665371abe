"""Seesaw loss: frequent classes penalise rare ones less; a class that is wrongly preferred is penalised more.

    loss = mean_i CE(z_i + log(M_yj C_ij) for the classes j other than y, y)
    M_yj = min(1, (N_j / N_y)^p),    N the samples of each class seen so far, at least 1
    C_ij = max(1, (p_ij / max(p_iy, eps))^q),    without gradient

The counts accumulate during training and include the current batch, as in mmpretrain; unlike in mmpretrain,
evaluation does not change them. The normalised head of the paper's detector is not part of this loss.

Paper: Wang et al., Seesaw Loss for Long-Tailed Instance Segmentation, CVPR 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longtail.distributed import summed
from longtail.errors import number
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction, Samples
from longtail.losses.inputs import ClassCounts


class Seesaw(CountsLoss):
    """Seesaw loss.

    The buffer `seen_counts` (K,) is saved in the state dict and summed over the processes of
    `torch.distributed`.

    Args:
        class_counts: (K,) training samples per class; only K is used, because the loss counts the samples itself.
        p: exponent of the mitigation factor M.
        q: exponent of the compensation factor C.
        eps: lower bound of the true class's probability in C.
        reduction: "mean" over the samples, "sum", or "none".
        ignore_index: samples with this target are ignored, also in `seen_counts`.
        label_smoothing: must be 0.

    Shapes: logits (N, K, d1, …), target (N, d1, …) → scalar.
    """

    one_class = "its factors compare every class with the one true class"
    seen_counts: Tensor

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        p: float = 0.8,
        q: float = 2.0,
        eps: float = 0.01,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.p = number("p", p, at_least=0)
        self.q = number("q", q, at_least=0)
        self.eps = number("eps", eps, above=0, at_most=1)
        self.register_buffer("seen_counts", torch.zeros_like(self.class_counts))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        if self.training:
            self._count(samples)
        balanced = samples.logits + self._log_factors(samples.logits.detach(), samples.target)
        return self.reduce_samples(self.cross_entropy(balanced, samples), samples)

    def _count(self, samples: Samples) -> None:
        ones = (~samples.ignored).to(self.seen_counts.dtype)
        batch = torch.zeros_like(self.seen_counts).scatter_add_(0, samples.target, ones)
        self.seen_counts += summed(batch)

    def _log_factors(self, logits: Tensor, target: Tensor) -> Tensor:
        """log(M C) of every sample and class, (S, K); for the true class the formula gives 0."""
        log_counts = self.seen_counts.clamp(min=1).to(logits.dtype).log()
        mitigation = self.p * (log_counts - log_counts[target].unsqueeze(1)).clamp(max=0)
        log_probability = logits.log_softmax(1)
        truth = log_probability.gather(1, target.unsqueeze(1)).clamp(min=math.log(self.eps))
        return mitigation + self.q * (log_probability - truth).clamp(min=0)
