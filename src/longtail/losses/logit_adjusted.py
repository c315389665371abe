"""Logit-adjusted loss: in training, add the scaled log prior to the logits; at test, do not.

    loss = CE(z + tau * log pi, y),    pi = n / sum n

With tau 0 it is cross-entropy, with tau 1 Balanced Softmax. This is the formula of the paper; the released
code uses log(pi^tau + 1e-12), which changes the logits of rare classes when tau is large.

Paper: Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021.
"""

from __future__ import annotations

from torch import Tensor

from longtail.errors import number
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction
from longtail.losses.inputs import ClassCounts


class LogitAdjusted(CountsLoss):
    """Cross-entropy of logits to which `tau * log pi` is added.

    Args:
        class_counts: (K,) training samples per class.
        tau: strength, at least 0.
        reduction: "mean" over the samples, "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: share of the target that is spread over all classes.

    Shapes: logits (N, K, d1, …), target (N, d1, …) or probabilities (N, K, d1, …) → scalar.
    """

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        tau: float = 1.0,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.tau = number("tau", tau, at_least=0)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        adjusted = samples.logits + self.tau * self.prior(samples.logits).log()
        return self.reduce_samples(self.cross_entropy(adjusted, samples), samples)
