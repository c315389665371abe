"""Class-balanced weighting: errors on a class count the more, the fewer samples it has.

    loss = sum_i w_{y_i} CE_i / sum_i w_{y_i},    w_c proportional to 1 / n_c, summing to K

Known as re-weighting by inverse class frequency; CBW in Wang et al., Margin Calibration for
Long-Tailed Visual Recognition, ACML 2022.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from longtail.errors import choose
from longtail.losses.inputs import ClassCounts, CountsLoss, check_batch

DivideBy = Literal["batch", "weights"]


class WeightedCrossEntropy(CountsLoss):
    """Cross-entropy weighted by 1/n (CBW).

    Papers write the mean over the batch; released code inherits torch's weighted mean, which divides
    by the sum of the batch's weights. The default is that of the code the published numbers come from.

    Args:
        class_counts: (K,) training samples per class.
        divide_by: "weights", the sum of the samples' weights, or "batch", the number of samples.

    Shapes: logits (N, K), target (N,) → scalar.

    >>> import torch
    >>> loss = WeightedCrossEntropy([400, 400, 100])
    >>> loss.weights(torch.zeros(1)).tolist()
    [0.5, 0.5, 2.0]
    """

    def __init__(self, class_counts: ClassCounts, *, divide_by: DivideBy = "weights") -> None:
        super().__init__(class_counts)
        self.divide_by = as_divide_by(divide_by)

    def weights(self, like: Tensor) -> Tensor:
        """Weights (K,) in the type of another tensor."""
        return sum_to_classes(self.counts(like).reciprocal())

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target = check_batch(logits, target, self.num_classes)
        losses = F.cross_entropy(logits, target, reduction="none")
        return weighted_mean(losses, self.weights(logits)[target], self.divide_by)


def sum_to_classes(weights: Tensor) -> Tensor:
    """Class weights (K,) rescaled to sum to K."""
    return weights * (len(weights) / weights.sum())


def as_divide_by(divide_by: str) -> str:
    return choose("divide_by", divide_by, ("batch", "weights"))


def weighted_mean(losses: Tensor, weights: Tensor, divide_by: str) -> Tensor:
    """Losses (N,) times weights (N,), divided by N or by the sum of the weights."""
    total = (losses * weights).sum()
    return total / (weights.sum() if divide_by == "weights" else len(losses))
