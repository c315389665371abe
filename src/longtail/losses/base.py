"""What every loss shares with `nn.CrossEntropyLoss`: shapes, ignored samples, soft targets, reduction."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.errors import UserError, choose, number
from longtail.losses.inputs import (
    ClassCounts,
    as_class_counts,
    as_logits,
    check_class_numbers,
    check_probabilities,
    check_target,
    rows_of,
)

Reduction = Literal["mean", "sum", "none"]

IGNORE_INDEX = -100  # the default of torch
SOFT_LOSSES = "BalancedSoftmax, LogitAdjusted, WeightedCrossEntropy or ClassBalanced with form='softmax'"


class Loss(nn.Module):
    """Base class: reduces one loss per sample to the mean, the sum, or not at all.

    Args:
        reduction: "mean", "sum", or "none" for one loss per sample.
        ignore_index: samples with this target are ignored.
    """

    def __init__(self, *, reduction: Reduction, ignore_index: int) -> None:
        super().__init__()
        self.reduction = choose("reduction", reduction, ("mean", "sum", "none"))
        if not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool):
            raise UserError(f"ignore_index must be a whole number, not {ignore_index!r}")
        self.ignore_index: int = int(ignore_index)

    @property
    def num_classes(self) -> int | None:
        """K, or None if the loss learns it from the logits."""
        return None

    def reduce(self, losses: Tensor, ignored: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce losses (S,). The mean divides by the number of samples or, with weights (S,), by their sum."""
        losses = losses.masked_fill(ignored, 0)
        if self.reduction == "none":
            return losses
        total = losses.sum()
        if self.reduction == "sum":
            return total
        return total / ((~ignored).sum() if weights is None else weights.masked_fill(ignored, 0).sum())

    def extra_repr(self) -> str:
        """The settings of the loss, and settings of `nn.CrossEntropyLoss` that differ from the default."""
        shown = [] if self.num_classes is None else [f"num_classes={self.num_classes}"]
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, None)
            default = name in _SHARED and value == parameter.default
            if value is not None and not isinstance(value, Tensor) and not default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


_SHARED = ("reduction", "ignore_index", "label_smoothing")


class Samples(NamedTuple):
    """A batch with one row per sample. There are S samples: N, or N * d1 * … if logits are (N, K, d1, …)."""

    logits: Tensor
    """(S, K), in single or double precision."""
    target: Tensor
    """Class numbers (S,) int64, 0 for an ignored sample; or probabilities (S, K)."""
    ignored: Tensor
    """(S,) bool."""
    shape: tuple[int, ...]
    """(N, d1, …): the shape of one loss per sample."""


class LogitsLoss(Loss):
    """A loss `loss(logits, target)` that can replace `nn.CrossEntropyLoss`.

    Args:
        reduction: "mean", "sum", or "none" for one loss per sample, (N, d1, …).
        ignore_index: samples with this target are ignored.
        label_smoothing: share of the target that is spread over all classes, 0 to 1.

    Shapes: logits (N, K, d1, …) or (K,); target (N, d1, …) or (), class numbers, or probabilities in the
    shape of the logits.
    """

    one_class: str = ""
    """The reason why every sample must have one true class; empty if soft targets and smoothing are allowed."""

    def __init__(self, *, reduction: Reduction, ignore_index: int, label_smoothing: float) -> None:
        super().__init__(reduction=reduction, ignore_index=ignore_index)
        self.label_smoothing = number("label_smoothing", label_smoothing, at_least=0, at_most=1)
        if self.one_class and self.label_smoothing:
            raise self._refusal("label_smoothing")

    def _refusal(self, what: str) -> UserError:
        return UserError(f"{type(self).__name__} takes no {what}: {self.one_class}. Use {SOFT_LOSSES}")

    def samples(self, logits: Tensor, target: Tensor) -> Samples:
        """Check a batch and arrange it with one row per sample."""
        rows, shape = as_logits(logits, self.num_classes, type(self).__name__)
        if self.reduction == "mean" and len(rows) == 0:
            raise UserError("the batch is empty: reduction='mean' needs at least one sample")
        if isinstance(target, Tensor) and target.is_floating_point() and target.shape == logits.shape:
            return self._soft(rows, target, shape)
        soft = "" if self.one_class else f", or probabilities of shape {tuple(logits.shape)}"
        check_target(target, shape, soft)
        numbers = target.long().flatten()
        check_class_numbers(numbers, rows.shape[1], self.ignore_index)
        ignored = numbers == self.ignore_index
        return Samples(rows, numbers.masked_fill(ignored, 0), ignored, shape)

    def _soft(self, rows: Tensor, target: Tensor, shape: tuple[int, ...]) -> Samples:
        if self.one_class:
            raise self._refusal("soft targets")
        if self.ignore_index >= 0:
            raise UserError(
                f"ignore_index {self.ignore_index} is a class number, and soft targets are not class numbers; "
                f"use ignore_index={IGNORE_INDEX}"
            )
        probabilities = rows_of(target).to(rows.dtype)
        check_probabilities(probabilities)
        return Samples(rows, probabilities, torch.zeros_like(rows[:, 0], dtype=torch.bool), shape)

    def cross_entropy(self, logits: Tensor, samples: Samples, weights: Tensor | None = None) -> Tensor:
        """Cross-entropy per sample (S,), with torch's label smoothing and class weights (K,)."""
        smoothing = self.label_smoothing
        return F.cross_entropy(logits, samples.target, weights, reduction="none", label_smoothing=smoothing)

    def reduce_samples(self, losses: Tensor, samples: Samples, weights: Tensor | None = None) -> Tensor:
        """Reduce losses (S,); "none" returns them in the shape of the target."""
        reduced = self.reduce(losses, samples.ignored, weights)
        return reduced.reshape(samples.shape) if self.reduction == "none" else reduced


class CountsLoss(LogitsLoss):
    """A loss that knows how many training samples each class has.

    The module stores only the counts, as integers, in a buffer that is not saved. Weights, margins and priors
    are computed from the counts in the precision of the logits, so `.half()` or a device without float64
    does not make them less precise.

    Args:
        class_counts: (K,) training samples per class, each at least 1.
        reduction, ignore_index, label_smoothing: see `LogitsLoss`.
    """

    class_counts: Tensor

    def __init__(
        self,
        class_counts: ClassCounts,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        counts = as_class_counts(class_counts, type(self).__name__)
        self.register_buffer("class_counts", counts, persistent=False)

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)

    def counts(self, like: Tensor) -> Tensor:
        """Class counts (K,) in the dtype of another tensor."""
        return self.class_counts.to(like.dtype)

    def prior(self, like: Tensor) -> Tensor:
        """Share of each class in the training set (K,), in the dtype of another tensor."""
        counts = self.counts(like)
        return counts / counts.sum()
