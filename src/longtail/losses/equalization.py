"""Equalization loss: samples of other classes do not push a rare class down.

    w_ij = 1 - beta_ij * rare_j * (j is not y_i),    beta_ij ~ Bernoulli(gamma),    rare_j: n_j / sum n < threshold
    loss = mean_i -log( exp(z_iy) / sum_j w_ij exp(z_ij) )

The paper's softmax form, for classification. Its threshold is a share of the training samples, and 0.005
is the value for CIFAR: it makes 1 of the 10 classes of CIFAR-10-LT 100 rare and 52 of the 100 of
CIFAR-100-LT 100. The 0.00177 of detection on LVIS is made for 1,230 classes: none of ten would be rare.

Paper: Tan et al., Equalization Loss for Long-Tailed Object Recognition, CVPR 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.errors import UserError, number
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction
from longtail.losses.inputs import ClassCounts, rows_of


class Equalization(CountsLoss):
    """Softmax equalization loss; beta is drawn from torch's global generator, anew for every element.

    Args:
        class_counts: (K,) training samples per class.
        gamma: probability that a rare class is spared; 0 is cross-entropy.
        threshold: classes with a smaller share of the training samples are rare; where no share is that
            small, the loss is cross-entropy.
        reduction: "mean" over the samples, "sum", or "none".
        ignore_index: samples with this target do not count.
        label_smoothing: 0; anything else is refused.

    Shapes: logits (N, K, d1, …), target (N, d1, …) → scalar.
    """

    rare: Tensor

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        gamma: float = 0.9,
        threshold: float = 0.005,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.require_one_class("a rare class that is not the true one may have no probability at all")
        self.gamma = number("gamma", gamma, at_least=0, at_most=1)
        self.threshold = number("threshold", threshold, at_least=0, at_most=1)
        share = self.class_counts.double() / self.class_counts.sum()
        self.register_buffer("rare", share < self.threshold, persistent=False)

    def forward(self, logits: Tensor, target: Tensor, beta: Tensor | None = None) -> Tensor:
        """The loss; `beta` of truth values in the shape of the logits takes the place of the random draw."""
        samples = self.samples(logits, target)
        if beta is not None and beta.shape != logits.shape:
            raise UserError(f"beta must have the shape of the logits, {tuple(logits.shape)}, not {tuple(beta.shape)}")
        drawn = torch.rand_like(samples.logits) < self.gamma if beta is None else rows_of(beta).bool()
        other = ~F.one_hot(samples.target, self.num_classes).bool()
        # A weight of 0 in the denominator is a logit of minus infinity, and so nothing overflows.
        kept = samples.logits.masked_fill(drawn & self.rare & other, -float("inf"))
        return self.reduce_samples(self.cross_entropy(kept, samples), samples)
