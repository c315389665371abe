"""Focal loss: samples that are already classified well have less weight.

    softmax:  mean_i (1 - p_{y_i})^gamma * CE_i
    sigmoid:  mean_i sum_k (1 - p_ik)^gamma * BCE_ik,    p_ik the probability of the true label of class k

With gamma 0 it is cross-entropy.

Paper: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from longtail.errors import choose, number
from longtail.losses.base import IGNORE_INDEX, LogitsLoss, Reduction
from longtail.losses.inputs import ClassWeights, as_class_weights


class Focal(LogitsLoss):
    """Focal loss. Class weights multiply the loss and do not change p.

    The gradient flows through the factor (1 - p)^gamma, as in the paper; some released codes detach it.
    Others compute p from the weighted cross-entropy and so use p^w instead of p. Gamma is 2 as in the
    paper; the LDAM-DRW experiments use 1.

    Args:
        gamma: focusing parameter, at least 0.
        form: "softmax", or "sigmoid": the sum of K binary losses, about K times as large.
        class_weights: (K,) each sample's loss is multiplied by the weight of its class; stored in the
            precision given.
        reduction: "mean" (divides by the number of samples, also with class weights), "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: must be 0.

    Shapes: logits (N, K, d1, …), target (N, d1, …) → scalar.

    >>> import torch
    >>> logits, target = torch.tensor([[2.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 0])
    >>> round(Focal(gamma=0)(logits, target).item(), 4), round(Focal(gamma=2)(logits, target).item(), 4)
    (0.3005, 0.0347)
    """

    one_class = "its factor (1 - p)^gamma uses the probability of the one true class"
    class_weights: Tensor | None

    def __init__(
        self,
        *,
        gamma: float = 2.0,
        form: Literal["softmax", "sigmoid"] = "softmax",
        class_weights: ClassWeights | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.gamma = number("gamma", gamma, at_least=0)
        self.form = choose("form", form, ("softmax", "sigmoid"))
        weights = None if class_weights is None else as_class_weights(class_weights)
        self.register_buffer("class_weights", weights, persistent=False)

    @property
    def num_classes(self) -> int | None:
        return None if self.class_weights is None else len(self.class_weights)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        form = softmax_focal if self.form == "softmax" else sigmoid_focal
        losses = form(samples.logits, samples.target, self.gamma)
        if self.class_weights is not None:
            losses = losses * self.class_weights.to(losses.dtype)[samples.target]
        return self.reduce_samples(losses, samples)


def softmax_focal(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    """Softmax form per sample, (S,)."""
    truth = target.unsqueeze(1)
    rest = logits.scatter(1, truth, -float("inf")).logsumexp(1)
    return _focal(rest - logits.gather(1, truth).squeeze(1), gamma)


def sigmoid_focal(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    """Sigmoid form per sample: its K terms summed, (S,)."""
    truth = F.one_hot(target, logits.shape[1]).bool()
    return _focal(logits.where(~truth, -logits), gamma).sum(1)


def _focal(log_odds: Tensor, gamma: float) -> Tensor:
    """(1 - p)^gamma * -log p from the log-odds of being wrong, log((1 - p) / p).

    Computed from p itself, the power would have an infinite gradient at p = 1 when gamma < 1.
    """
    return (gamma * F.logsigmoid(log_odds)).exp() * -F.logsigmoid(-log_odds)
