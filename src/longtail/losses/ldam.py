"""LDAM: rarer classes get a larger margin.

    m_c = n_c^(-1/4), rescaled so that the largest is max_margin
    loss = CE(s * (cos - m_y for the true class), y),    cos the cosines of features and class vectors

The margin applies in training only; at test the prediction is the class with the largest cosine. For
deferred re-weighting (DRW) see `longtail.networks.objective`.

Paper: Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS 2019.
"""

from __future__ import annotations

from torch import Tensor

from longtail.errors import number
from longtail.losses.base import IGNORE_INDEX, CountsLoss, Reduction
from longtail.losses.inputs import ClassCounts, ClassWeights, as_class_weights
from longtail.losses.weighted import DivideBy, as_divide_by, divisor


class LDAM(CountsLoss):
    """Label-distribution-aware margin loss on the outputs of a normalised head.

    Args:
        class_counts: (K,) training samples per class.
        max_margin: margin of the rarest class, in units of the cosine.
        scale: factor s that multiplies the cosines after the margin is subtracted.
        class_weights: (K,) weights for the deferred phase, stored in the precision given.
        divide_by: what "mean" divides by if there are class weights: "weights", their sum over the samples
            (the released code), or "batch", the number of samples (the paper); neither includes ignored
            samples.
        scaled: True if the logits are already multiplied by `scale`, like those of `CosineHead`; False if
            they are plain cosines, as in the released code.
        reduction: "mean", "sum", or "none".
        ignore_index: samples with this target are ignored.
        label_smoothing: must be 0.

    Shapes: logits (N, K, d1, …), target (N, d1, …) → scalar.
    """

    one_class = "it subtracts the margin of the one true class"
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
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_counts, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.max_margin = number("max_margin", max_margin, at_least=0)
        self.scale = number("scale", scale, above=0)
        self.divide_by = as_divide_by(divide_by)
        self.scaled = scaled
        weights = None if class_weights is None else as_class_weights(class_weights, self.num_classes)
        self.register_buffer("class_weights", weights, persistent=False)

    def margins(self, like: Tensor) -> Tensor:
        """Margin of each class (K,) in the dtype of another tensor."""
        counts = self.counts(like)
        return self.max_margin * (counts.min() / counts) ** 0.25

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        samples = self.samples(logits, target)
        truth = samples.target.unsqueeze(1)
        margins = self.scale * self.margins(samples.logits)[truth]
        cosines = samples.logits if self.scaled else self.scale * samples.logits
        shifted = cosines.scatter_add(1, truth, -margins)
        if self.class_weights is None:
            return self.reduce_samples(self.cross_entropy(shifted, samples), samples)
        weights = self.class_weights.to(shifted.dtype)
        losses = self.cross_entropy(shifted, samples, weights)
        return self.reduce_samples(losses, samples, divisor(weights, samples, self.divide_by))
