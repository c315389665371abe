"""LADE: cross-entropy under the training prior, and logits that estimate a density ratio of their own.

    loss = CE(z + log pi, y) + alpha * LADER
    LADER = -sum_c pi_c (mean of z_c over the samples of class c - S_c - lambda * S_c^2)
    S_c = log mean_i exp(z_ic - log pi_c + log 1/K)

The regulariser takes the raw logits. A class absent from the batch has 0 for its mean and keeps its
S_c, as in the released code. At test the raw logits are used.

Paper: Hong et al., Disentangling Label Distribution for Long-Tailed Visual Recognition, CVPR 2021.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.errors import number
from longtail.losses.inputs import ClassCounts, CountsLoss, check_batch

PRIOR_FLOOR = 1e-9  # inside the logarithms of the released code; moves the rarest classes by up to 1e-5


class LADE(CountsLoss):
    """Label distribution disentangling.

    Authors' settings: CIFAR-100-LT 100 remine_lambda 0.01; ImageNet-LT and iNaturalist 0.5 with alpha
    0.05; Places-LT alpha 0.005.

    Args:
        class_counts: (K,) training samples per class.
        alpha: weight of the regulariser; 0 leaves the cross-entropy under the prior.
        remine_lambda: weight of S^2 within it.

    Shapes: logits (N, K), target (N,) → scalar.
    """

    def __init__(self, class_counts: ClassCounts, *, alpha: float = 0.1, remine_lambda: float = 0.1) -> None:
        super().__init__(class_counts)
        self.alpha = number("alpha", alpha, at_least=0)
        self.remine_lambda = number("remine_lambda", remine_lambda, at_least=0)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target = check_batch(logits, target, self.num_classes)
        log_prior = (self.prior(logits) + PRIOR_FLOOR).log()
        return F.cross_entropy(logits + log_prior, target) + self.alpha * self.regulariser(logits, target)

    def regulariser(self, logits: Tensor, target: Tensor) -> Tensor:
        """LADER of logits (N, K) and target (N,), a scalar."""
        prior = self.prior(logits)
        truth = F.one_hot(target, self.num_classes).to(logits.dtype)
        of_class = (logits * truth).sum(0) / truth.sum(0).clamp(min=1)
        uniform = math.log(1 / self.num_classes + PRIOR_FLOOR)
        log_mean = torch.logsumexp(logits, 0) - math.log(len(logits)) - (prior + PRIOR_FLOOR).log() + uniform
        return -(prior * (of_class - log_mean - self.remine_lambda * log_mean**2)).sum()
