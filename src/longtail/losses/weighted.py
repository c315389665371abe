"""Class-balanced weighting: the fewer samples a class has, the larger the weight of its samples.

    loss = sum_i w_{y_i} CE_i / sum_i w_{y_i},    w_c proportional to 1 / n_c, summing to K

Also known as re-weighting by inverse class frequency; CBW in Wang et al., Margin Calibration for
Long-Tailed Visual Recognition, ACML 2022.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from longtail.errors import choose
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction, Samples
from longtail.losses.inputs import ClassCounts

DivideBy = Literal["batch", "weights"]


class WeightedCrossEntropy(CountsLoss):
    """Cross-entropy weighted by 1/n (CBW).

    Papers divide by the batch size. Released code uses torch's weighted mean, which divides by the sum of the
    weights in the batch. The default follows the released code, because the published numbers come from it.

    With soft targets the weight of a class multiplies its component of the target, as in torch. The loss is
    linear in the target, so mixup can mix targets or losses. Torch divides by the number of samples for soft
    targets; here `divide_by` keeps its meaning, so one-hot targets give the same loss as class numbers.

    Args:
        class_counts: (K,) training samples per class.
        divide_by: what "mean" divides by: "weights", the sum of the samples' weights, or "batch", the
            number of samples; neither includes ignored samples.
        reduction: "mean", "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: share of the target that is spread over all classes. The weights multiply the smoothed
            target; the divisor is computed from the target before smoothing.

    Shapes: logits (N, K, d1, …), target (N, d1, …) or probabilities (N, K, d1, …) → scalar.

    >>> import torch
    >>> loss = WeightedCrossEntropy([400, 400, 100])
    >>> loss.weights(torch.zeros(1)).tolist()
    [0.5, 0.5, 2.0]
    """

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        divide_by: DivideBy = "weights",
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.divide_by = as_divide_by(divide_by)

    def weights(self, like: Tensor) -> Tensor:
        """Weights (K,) in the dtype of another tensor."""
        return sum_to_classes(self.counts(like).reciprocal())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        weights = self.weights(samples.logits)
        losses = self.cross_entropy(samples.logits, samples, weights)
        return self.reduce_samples(losses, samples, divisor(weights, samples, self.divide_by))


def sum_to_classes(weights: Tensor) -> Tensor:
    """Class weights (K,) rescaled to sum to K."""
    return weights * (len(weights) / weights.sum())


def as_divide_by(divide_by: str) -> str:
    return choose("divide_by", divide_by, ("batch", "weights"))


def divisor(weights: Tensor, samples: Samples, divide_by: str) -> Tensor | None:
    """Sample weights (S,) from class weights (K,), whose sum a mean divides by; None for the number of samples."""
    if divide_by == "batch":
        return None
    return weights[samples.target] if samples.target.ndim == 1 else (samples.target * weights).sum(1)
