"""Balanced Softmax: in training, add the logarithm of the class counts to the logits; at test, do not.

    loss = CE(z + log n, y)

Counts and priors give the same loss: they differ by a constant, which the softmax ignores.

Paper: Ren et al., Balanced Meta-Softmax for Long-Tailed Visual Recognition, NeurIPS 2020.
"""

from __future__ import annotations

from torch import Tensor

from longtail.losses.base import CountsLoss


class BalancedSoftmax(CountsLoss):
    """Cross-entropy of logits to which the log class counts are added.

    Args:
        class_counts: (K,) training samples per class.
        reduction: "mean" over the samples, "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: share of the target that is spread over all classes.

    Shapes: logits (N, K, d1, …), target (N, d1, …) or probabilities (N, K, d1, …) → scalar.
    """

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        adjusted = samples.logits + self.counts(samples.logits).log()
        return self.reduce_samples(self.cross_entropy(adjusted, samples), samples)
