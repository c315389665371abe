"""Class-Balanced loss: weight a class by the effective number of its samples.

    w_c proportional to (1 - beta) / (1 - beta^n_c), summing to K
    loss = mean_i w_{y_i} L_i,    L softmax cross-entropy, K sigmoid cross-entropies, or K focal terms

beta 0 gives equal weights, beta → 1 weights 1/n.

Paper: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019.
"""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from longtail.errors import choose, number
from longtail.losses.focal import sigmoid_focal
from longtail.losses.inputs import ClassCounts, CountsLoss, check_batch
from longtail.losses.weighted import DivideBy, as_divide_by, sum_to_classes, weighted_mean


class ClassBalanced(CountsLoss):
    """The Class-Balanced loss in its three forms.

    In the sigmoid and focal forms the weight of the true class multiplies all K terms of a sample, as
    published, and the head starts with bias -log(K - 1). The default division is the authors', by the
    batch size; LDAM-DRW's version of this loss divides by the sum of the weights.

    Args:
        class_counts: (K,) training samples per class.
        form: "softmax", "sigmoid", or "focal" (sigmoid with focal terms).
        beta: how fast further samples stop to count, at least 0 and below 1.
        gamma: focusing of the focal form.
        divide_by: "batch", the number of samples, or "weights", the sum of their weights.

    Shapes: logits (N, K), target (N,) → scalar.
    """

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        form: Literal["softmax", "sigmoid", "focal"] = "softmax",
        beta: float = 0.9999,
        gamma: float = 2.0,
        divide_by: DivideBy = "batch",
    ) -> None:
        super().__init__(class_counts)
        self.form = choose("form", form, ("softmax", "sigmoid", "focal"))
        self.beta = number("beta", beta, at_least=0, below=1)
        self.gamma = number("gamma", gamma, at_least=0)
        self.divide_by = as_divide_by(divide_by)

    def weights(self, like: Tensor) -> Tensor:
        """Weights (K,) in the type of another tensor."""
        return effective_number_weights(self.counts(like), self.beta)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target = check_batch(logits, target, self.num_classes)
        if self.form == "softmax":
            losses = F.cross_entropy(logits, target, reduction="none")
        else:
            losses = sigmoid_focal(logits, target, self.gamma if self.form == "focal" else 0.0)
        return weighted_mean(losses, self.weights(logits)[target], self.divide_by)


def effective_number_weights(counts: Tensor, beta: float) -> Tensor:
    """Weights (K,) of class counts (K,) of a floating type.

    >>> import torch
    >>> effective_number_weights(torch.tensor([1000.0, 1.0]), 0.0).tolist()
    [1.0, 1.0]
    """
    # 1 - beta^n from its logarithm: with beta near 1 and few samples the difference would lose its digits.
    log_beta = math.log(beta) if beta > 0 else -math.inf
    return sum_to_classes(1 / -(counts * log_beta).expm1())
