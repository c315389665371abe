"""LADE: cross-entropy under the training prior, and a regulariser that makes the raw logits independent of the prior.

    loss = CE(z + log pi, y) + alpha * LADER
    LADER = -sum_c pi_c (mean of z_c over the samples of class c - S_c - lambda * S_c^2)
    S_c = log mean_i exp(z_ic - log pi_c + log 1/K)

The regulariser takes the raw logits. For a class that is absent from the batch, the mean is 0 and S_c
remains, as in the released code. At test, the raw logits are right for a balanced test set; for another
test set, add the logarithm of its class shares.

Paper: Hong et al., Disentangling Label Distribution for Long-Tailed Visual Recognition, CVPR 2021.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from longtail.errors import number
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction, Samples
from longtail.losses.inputs import ClassCounts

PRIOR_FLOOR = 1e-9  # the released code adds it inside the logarithms; it changes the rarest classes by up to 1e-5


class LADE(CountsLoss):
    """Label distribution disentangling loss.

    The authors' settings: remine_lambda 0.01 on CIFAR-100-LT 100; remine_lambda 0.5 and alpha 0.05 on
    ImageNet-LT and iNaturalist; alpha 0.005 on Places-LT.

    Args:
        class_counts: (K,) training samples per class.
        alpha: weight of the regulariser; with 0 only the cross-entropy under the prior remains.
        remine_lambda: weight of S^2 in the regulariser.
        reduction: "mean" over the samples, "sum", or "none". The regulariser is one number for the batch. It
            is added to the loss of every sample, so that "mean" and "sum" are the mean and the sum of "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: must be 0.

    Shapes: logits (N, K, d1, …), target (N, d1, …) → scalar.
    """

    one_class = "its regulariser takes means over the samples of each class"

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        alpha: float = 0.1,
        remine_lambda: float = 0.1,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.alpha = number("alpha", alpha, at_least=0)
        self.remine_lambda = number("remine_lambda", remine_lambda, at_least=0)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        log_prior = (self.prior(samples.logits) + PRIOR_FLOOR).log()
        losses = self.cross_entropy(samples.logits + log_prior, samples)
        return self.reduce_samples(losses + self.alpha * self.regulariser(samples), samples)

    def regulariser(self, samples: Samples) -> Tensor:
        """LADER of the samples that are not ignored, a scalar."""
        prior, ignored = self.prior(samples.logits), samples.ignored.unsqueeze(1)
        truth = F.one_hot(samples.target, self.num_classes).masked_fill(ignored, 0).to(prior.dtype)
        of_class = (samples.logits * truth).sum(0) / truth.sum(0).clamp(min=1)
        log_size = truth.sum().log()
        uniform = math.log(1 / self.num_classes + PRIOR_FLOOR)
        log_sum = samples.logits.masked_fill(ignored, -float("inf")).logsumexp(0)
        log_mean = log_sum - log_size - (prior + PRIOR_FLOOR).log() + uniform
        return -(prior * (of_class - log_mean - self.remine_lambda * log_mean**2)).sum()
