"""LDAM: rare classes must be right by a larger margin.

    m_c = n_c^(-1/4), rescaled so that the largest is max_margin
    loss = CE(s * (cos - m_y for the true class), y),    cos the cosines of features and class vectors

Deferred re-weighting (DRW) is a schedule: see `longtail.networks.deferred`.

Paper: Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from longtail.errors import number
from longtail.losses.inputs import ClassCounts, ClassWeights, CountsLoss, as_class_weights, check_batch
from longtail.losses.weighted import DivideBy, as_divide_by, weighted_mean


class LDAM(CountsLoss):
    """Label-distribution-aware margin loss on the outputs of a normalised head.

    Args:
        class_counts: (K,) training samples per class.
        max_margin: margin of the rarest class, in units of the cosine.
        scale: factor s of the cosines after the margin.
        class_weights: (K,) weights for the deferred phase, kept in the precision given.
        divide_by: with class weights: "weights", their sum over the batch (the released code), or
            "batch", the number of samples (the paper).
        scaled: the logits are multiplied by `scale` already, as those of `CosineHead` are; otherwise
            they are plain cosines, as in the released code.

    Shapes: logits (N, K), target (N,) → scalar.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        max_margin: float = 0.5,
        scale: float = 30.0,
        class_weights: ClassWeights | None = None,
        divide_by: DivideBy = "weights",
        scaled: bool = False,
    ) -> None:
        super().__init__(class_counts)
        self.max_margin = number("max_margin", max_margin, at_least=0)
        self.scale = number("scale", scale, above=0)
        self.divide_by = as_divide_by(divide_by)
        self.scaled = scaled
        weights = None if class_weights is None else as_class_weights(class_weights, self.num_classes)
        self.register_buffer("class_weights", weights, persistent=False)

    def margins(self, like: Tensor) -> Tensor:
        """Margin of each class (K,) in the type of another tensor."""
        counts = self.counts(like)
        return self.max_margin * (counts.min() / counts) ** 0.25

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target = check_batch(logits, target, self.num_classes)
        truth = target.unsqueeze(1)
        margins = self.scale * self.margins(logits)[truth]
        shifted = (logits if self.scaled else self.scale * logits).scatter_add(1, truth, -margins)
        if self.class_weights is None:
            return F.cross_entropy(shifted, target)
        losses = F.cross_entropy(shifted, target, reduction="none")
        return weighted_mean(losses, self.class_weights.to(logits.dtype)[target], self.divide_by)
