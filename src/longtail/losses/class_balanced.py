"""Class-Balanced loss: weight a class by the effective number of its samples.

    w_c proportional to (1 - beta) / (1 - beta^n_c), summing to K
    loss = mean_i w_{y_i} L_i,    L softmax cross-entropy, K sigmoid cross-entropies, or K focal terms

With beta 0 all weights are equal; with beta → 1 they approach 1/n.

Paper: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from longtail.errors import choose, number
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction
from longtail.losses.focal import sigmoid_focal
from longtail.losses.inputs import ClassCounts
from longtail.losses.weighted import DivideBy, as_divide_by, divisor, sum_to_classes


class ClassBalanced(CountsLoss):
    """The Class-Balanced loss in its three forms.

    In the sigmoid and focal forms the weight of the true class multiplies all K terms of a sample, as in
    the paper. With these forms, initialise the bias of the head to -log(K - 1). By default the mean divides
    by the batch size, as the authors do; the LDAM-DRW code divides by the sum of the weights. The softmax
    form takes soft targets and label smoothing, with the same meaning as in `WeightedCrossEntropy`.

    Args:
        class_counts: (K,) training samples per class.
        form: "softmax", "sigmoid", or "focal" (sigmoid with focal terms).
        beta: at least 0 and below 1; the closer to 1, the more a class is weighted by 1/n.
        gamma: focusing parameter of the focal form.
        divide_by: what "mean" divides by: "batch", the number of samples, or "weights", the sum of their
            weights; neither includes ignored samples.
        reduction: "mean", "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: share of the target that is spread over all classes; softmax form only.

    Shapes: logits (N, K, d1, …), target (N, d1, …) or, softmax form, probabilities (N, K, d1, …) → scalar.
    """

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        form: Literal["softmax", "sigmoid", "focal"] = "softmax",
        beta: float = 0.9999,
        gamma: float = 2.0,
        divide_by: DivideBy = "batch",
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        # Set before the base class checks the label smoothing against it.
        self.form = choose("form", form, ("softmax", "sigmoid", "focal"))
        if self.form != "softmax":
            self.one_class = f"in the {self.form} form the weight of the one true class multiplies all K terms"
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.beta = number("beta", beta, at_least=0, below=1)
        self.gamma = number("gamma", gamma, at_least=0)
        self.divide_by = as_divide_by(divide_by)

    def weights(self, like: Tensor) -> Tensor:
        """Weights (K,) in the dtype of another tensor."""
        return effective_number_weights(self.counts(like), self.beta)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        weights = self.weights(samples.logits)
        if self.form == "softmax":
            losses = self.cross_entropy(samples.logits, samples, weights)
        else:
            gamma = self.gamma if self.form == "focal" else 0.0
            losses = sigmoid_focal(samples.logits, samples.target, gamma) * weights[samples.target]
        return self.reduce_samples(losses, samples, divisor(weights, samples, self.divide_by))


def effective_number_weights(counts: Tensor, beta: float) -> Tensor:
    """Weights (K,) from class counts (K,) of a floating dtype.

    >>> import torch
    >>> effective_number_weights(torch.tensor([1000.0, 1.0]), 0.0).tolist()
    [1.0, 1.0]
    """
    return sum_to_classes(inverse_effective_number(counts, beta))


def inverse_effective_number(counts: Tensor, beta: float) -> Tensor:
    """1 / (1 - beta^n) of counts of a floating dtype."""
    # 1 - beta^n is computed from the logarithm: with beta near 1 and small n the plain difference loses precision.
    log_power = counts * (math.log(beta) if beta > 0 else -math.inf)
    # expm1(x) is written as tanh(x/2) (e^x + 1): torch.compile turns torch.expm1 into e^x - 1, which is wrong by
    # 2e-4 for n = 1.
    return -1 / ((log_power / 2).tanh() * (log_power.exp() + 1))
