"""Logit-adjusted loss: in training add the scaled log prior, at test do not.

    loss = CE(z + tau * log pi, y),    pi = n / sum n

tau 0 is cross-entropy, tau 1 Balanced Softmax. The released code has log(pi^tau + 1e-12), which
moves the logits of rare classes when tau is large; this is the formula of the paper.

Paper: Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from longtail.errors import number
from longtail.losses.inputs import ClassCounts, CountsLoss, check_batch


class LogitAdjusted(CountsLoss):
    """Cross-entropy of logits to which `tau * log pi` is added.

    Args:
        class_counts: (K,) training samples per class.
        tau: strength, at least 0.

    Shapes: logits (N, K), target (N,) → scalar.
    """

    def __init__(self, class_counts: ClassCounts, *, tau: float = 1.0) -> None:
        super().__init__(class_counts)
        self.tau = number("tau", tau, at_least=0)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target = check_batch(logits, target, self.num_classes)
        return F.cross_entropy(logits + self.tau * self.prior(logits).log(), target)
