"""Class-balanced binary cross-entropy: positives and negatives of each label weigh by their effective numbers.

    w_k+ proportional to (1 - beta) / (1 - beta^n_k),    w_k- to (1 - beta) / (1 - beta^(N - n_k))
    scaled so that the mean weight of a label over the training set is 1
    loss = mean_ik t_ik w_k+ softplus(-z_ik) + (1 - t_ik) w_k- softplus(z_ik)

Each label is a two-class problem with weights of that label, and keeps its share of the loss. With beta 0 it is
`nn.BCEWithLogitsLoss`; with beta → 1 the weights are those of scikit-learn's `class_weight="balanced"`.

Paper: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019 (the weights, for one class per
sample).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.errors import UserError, number, whole_number
from longtail.files.tensors import single_at_least
from longtail.losses.base import IGNORE_INDEX, Loss, Reduction
from longtail.losses.class_balanced import inverse_effective_number
from longtail.losses.inputs import ClassCounts, as_class_counts, can_look_at


class ClassBalancedBCE(Loss):
    """Binary cross-entropy for several labels per sample, or for one logit, with weights per label.

    Args:
        class_counts: (K,) positives of each label in the training set: `labels.sum(0)`.
        num_samples: samples of the training set, N.
        beta: at least 0 and below 1; the closer to 1, the more both sides of a label weigh the same.
        reduction: "mean" over the entries, "sum", or "none" for one loss per entry, (N, K).
        ignore_index: entries with this target are ignored: labels that are not known.

    Shapes: logits (N, K), target (N, K) of 0 and 1, or numbers between (mixup) → scalar.

    >>> loss = ClassBalancedBCE([50, 1], num_samples=100)
    >>> [[round(weight, 2) for weight in side] for side in loss.weights(torch.zeros(1)).tolist()]
    [[1.0, 49.88], [1.0, 0.51]]
    """

    class_counts: Tensor

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        num_samples: int,
        beta: float = 0.9999,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        super().__init__(reduction=reduction, ignore_index=ignore_index)
        counts = as_class_counts(class_counts, type(self).__name__, at_least=1)
        self.num_samples = whole_number("num_samples", num_samples)
        if int(counts.max()) >= self.num_samples:
            label = int(counts.argmax())
            raise UserError(
                f"label {label} has {int(counts[label])} positives among {self.num_samples} samples, and no negative"
            )
        self.beta = number("beta", beta, at_least=0, below=1)
        self.register_buffer("class_counts", counts, persistent=False)

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)

    def weights(self, like: Tensor) -> Tensor:
        """Weights (2, K) of positives and negatives, in the dtype of another tensor."""
        counts = torch.stack([self.class_counts, self.num_samples - self.class_counts]).to(like.dtype)
        weights = inverse_effective_number(counts, self.beta)
        return weights * (self.num_samples / (weights * counts).sum(0))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] != self.num_classes:
            shape = tuple(getattr(logits, "shape", ()))
            raise UserError(f"logits must have shape (samples, {self.num_classes}), one column per label, not {shape}")
        if not isinstance(target, Tensor) or target.shape != logits.shape:
            shape = tuple(getattr(target, "shape", ()))
            raise UserError(f"target must have the shape of the logits, {tuple(logits.shape)}, not {shape}")
        ignored = target == self.ignore_index
        if can_look_at(target) and not bool((ignored | ((target >= 0) & (target <= 1))).all()):
            raise UserError(f"target must be 0 or 1, a number between, or ignore_index {self.ignore_index}")
        scores = single_at_least(logits)
        positive, negative = self.weights(scores)
        share = target.to(scores.dtype)
        losses = share * positive * F.softplus(-scores) + (1 - share) * negative * F.softplus(scores)
        return self.reduce(losses, ignored)
