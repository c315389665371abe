"""Equalization loss: samples of other classes do not lower the logit of a rare class.

    w_ij = 1 - beta_ij * rare_j * (j is not y_i),    beta_ij ~ Bernoulli(gamma),    rare_j: n_j / sum n < threshold
    loss = mean_i -log( exp(z_iy) / sum_j w_ij exp(z_ij) )

This is the paper's softmax form, for classification. The threshold is a share of the training samples. The
value for CIFAR is 0.005: 1 of the 10 classes of CIFAR-10-LT 100 is rare, and 52 of the 100 classes of
CIFAR-100-LT 100. The paper's 0.00177 is for detection on LVIS with its 1,230 classes; with ten classes it
makes none rare.

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
    """Softmax equalization loss. Each call draws a new beta for every element from torch's global generator.

    Args:
        class_counts: (K,) training samples per class.
        gamma: probability that a rare class is left out of the denominator; 0 gives cross-entropy.
        threshold: classes with a smaller share of the training samples are rare; without rare classes the
            loss is cross-entropy.
        reduction: "mean" over the samples, "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: must be 0.

    Shapes: logits (N, K, d1, …), target (N, d1, …) → scalar.
    """

    one_class = "a rare class that is not the true class may have probability 0"
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
        self.gamma = number("gamma", gamma, at_least=0, at_most=1)
        self.threshold = number("threshold", threshold, at_least=0, at_most=1)
        share = self.class_counts.double() / self.class_counts.sum()
        self.register_buffer("rare", share < self.threshold, persistent=False)

    def forward(self, logits: Tensor, target: Tensor, beta: Tensor | None = None) -> Tensor:
        """The loss. `beta`, a bool tensor in the shape of the logits, replaces the random draw."""
        samples = self.samples(logits, target)
        if beta is not None and beta.shape != logits.shape:
            raise UserError(f"beta must have the shape of the logits, {tuple(logits.shape)}, not {tuple(beta.shape)}")
        drawn = torch.rand_like(samples.logits) < self.gamma if beta is None else rows_of(beta).bool()
        other = ~F.one_hot(samples.target, self.num_classes).bool()
        # A weight of 0 in the denominator equals a logit of minus infinity, and a log-softmax cannot overflow.
        kept = samples.logits.masked_fill(drawn & self.rare & other, -float("inf"))
        return self.reduce_samples(self.cross_entropy(kept, samples), samples)
