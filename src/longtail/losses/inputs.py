"""What a loss is given, checked: class counts, settings and batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from longtail.core.arrays import single_at_least
from longtail.errors import UserError

ClassCounts = Tensor | np.ndarray | Sequence[int]
ClassWeights = Tensor | np.ndarray | Sequence[float]

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class CountsLoss(nn.Module):
    """A loss that knows how many training samples each class has.

    Kept are the counts alone, whole numbers outside the saved state. Weights, margins and priors are
    computed from them in the precision of the logits: neither `.half()` nor a device without float64
    can blur them.

    Args:
        class_counts: (K,) training samples per class, each at least 1.
    """

    class_counts: Tensor

    def __init__(self, class_counts: ClassCounts) -> None:
        super().__init__()
        counts = as_class_counts(class_counts, type(self).__name__)
        self.register_buffer("class_counts", counts, persistent=False)

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)

    def counts(self, like: Tensor) -> Tensor:
        """Class counts (K,) in the type of another tensor."""
        return self.class_counts.to(like.dtype)

    def prior(self, like: Tensor) -> Tensor:
        """Share of each class in the training set (K,), in the type of another tensor."""
        counts = self.counts(like)
        return counts / counts.sum()


def as_class_counts(class_counts: ClassCounts, needed_by: str) -> Tensor:
    """Class counts (K,) as int64, K at least 2 and every class with a sample."""
    counts = _vector("class_counts", class_counts)
    if len(counts) < 2:
        raise UserError(f"{needed_by} needs at least two classes, class_counts has {len(counts)}")
    if counts.is_floating_point() and not bool((torch.isfinite(counts) & (counts == counts.round())).all()):
        raise UserError("class_counts must be whole numbers of training samples")
    whole = counts.long()
    if bool((whole < 0).any()):
        raise UserError(f"class_counts[{int(whole.argmin())}] is negative")
    if bool((whole == 0).any()):
        empty = int(whole.argmin())
        raise UserError(
            f"class {empty} has no training sample; {needed_by} needs at least one per class "
            f"(class_counts[{empty}] == 0)"
        )
    return whole


def as_class_weights(class_weights: ClassWeights, num_classes: int | None = None) -> Tensor:
    """Weights (K,) of a floating type, finite and above 0."""
    weights = _vector("class_weights", class_weights)
    if num_classes not in (None, len(weights)):
        raise UserError(f"class_weights has {len(weights)} numbers for {num_classes} classes")
    if not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise UserError("class_weights must be finite and above 0")
    return weights if weights.is_floating_point() else weights.float()


def _vector(name: str, values: ClassCounts | ClassWeights) -> Tensor:
    """One number per class, a copy on the device it came from."""
    try:
        array = values.detach().clone() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} must be one number per class: {error}") from error
    if array.ndim != 1 or array.is_complex() or array.dtype == torch.bool:
        raise UserError(f"{name} must be one number per class, not {array.dtype} of shape {tuple(array.shape)}")
    return array


def check_batch(logits: Tensor, target: Tensor, num_classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Check logits (N, K) and target (N,); returns them in single precision at least, and as int64."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise UserError(f"logits must have shape (samples, classes), at least two classes, not {tuple(logits.shape)}")
    if num_classes not in (None, logits.shape[1]):
        raise UserError(f"logits have {logits.shape[1]} columns, class_counts {num_classes} classes")
    check_target(target, len(logits), logits.shape[1])
    return single_at_least(logits), target.long()


def check_target(target: Tensor, size: int, num_classes: int | None = None) -> None:
    """Check classes (N,) of N samples."""
    if not isinstance(target, Tensor):
        raise UserError(f"target must be a tensor of class numbers, not {type(target).__name__}")
    if target.shape != (size,) or target.dtype not in _WHOLE:
        raise UserError(
            f"target must hold one class number per sample: shape ({size},) and whole numbers, "
            f"not {tuple(target.shape)} of {target.dtype}"
        )
    if size == 0:
        raise UserError("the batch is empty: there is nothing to take a mean of")
    # Elsewhere the look at the values would wait for the device; indexing with them fails there by itself.
    if num_classes and target.device.type == "cpu":
        low, high = int(target.min()), int(target.max())
        if low < 0 or high >= num_classes:
            raise UserError(f"target must be 0..{num_classes - 1}, one column of the logits each; found {low}..{high}")
