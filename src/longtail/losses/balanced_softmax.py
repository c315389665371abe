"""Balanced Softmax: in training add the logarithm of the class counts, at test do not.

    loss = CE(z + log n, y)

Counts and priors give the same: the softmax does not see a constant.

Paper: Ren et al., Balanced Meta-Softmax for Long-Tailed Visual Recognition, NeurIPS 2020.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from longtail.losses.inputs import CountsLoss, check_batch


class BalancedSoftmax(CountsLoss):
    """Cross-entropy of logits to which the log class counts are added.

    Args:
        class_counts: (K,) training samples per class.

    Shapes: logits (N, K), target (N,) → scalar.
    """

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target = check_batch(logits, target, self.num_classes)
        return F.cross_entropy(logits + self.counts(logits).log(), target)
