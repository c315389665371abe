"""Checks of what a loss receives: class counts, class weights, logits and targets.

Values are checked on the CPU only. On another device the check would wait for the device, and while
`torch.compile` traces there are no values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longtail.errors import UserError
from longtail.files.tensors import single_at_least

ClassCounts = Tensor | np.ndarray | Sequence[int]
ClassWeights = Tensor | np.ndarray | Sequence[float]

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SUM_TOLERANCE = 0.01  # the sum of probabilities in bfloat16 differs from 1 by some thousandths


def as_class_counts(class_counts: ClassCounts, needed_by: str, *, at_least: int = 2) -> Tensor:
    """Class counts (K,) as int64, of at least so many classes; every class must have a sample."""
    counts = _vector("class_counts", class_counts)
    if len(counts) < at_least:
        least = "two classes" if at_least == 2 else "one label"
        raise UserError(f"{needed_by} needs at least {least}, class_counts has {len(counts)}")
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
    """Weights (K,) of a floating dtype; all must be finite and above 0."""
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


def as_logits(logits: Tensor, num_classes: int | None, needed_by: str) -> tuple[Tensor, tuple[int, ...]]:
    """Logits (N, K, d1, …), or (K,) of one sample, as rows (S, K) in single or double precision; and (N, d1, …)."""
    if not isinstance(logits, Tensor):
        raise UserError(f"logits must be a tensor, not {type(logits).__name__}")
    dimension = min(logits.ndim - 1, 1)
    if logits.ndim == 0 or logits.shape[dimension] < 2:
        raise UserError(
            "logits must have shape (samples, classes) or (samples, classes, …) with at least two classes, "
            f"not {tuple(logits.shape)}"
        )
    if num_classes is not None and logits.shape[dimension] != num_classes:
        raise UserError(
            f"logits of shape {tuple(logits.shape)} have {logits.shape[dimension]} classes in dimension {dimension}, "
            f"but {needed_by} was built for {num_classes}"
        )
    return rows_of(single_at_least(logits)), (*logits.shape[:dimension], *logits.shape[dimension + 1 :])


def rows_of(values: Tensor) -> Tensor:
    """(N, K, d1, …) or (K,) → (S, K): one row per sample, in the order of its (N, d1, …)."""
    if values.ndim == 1:
        return values.unsqueeze(0)
    return values.movedim(1, -1).reshape(-1, values.shape[1])


def check_target(target: Tensor, shape: tuple[int, ...], otherwise: str = "") -> None:
    """Check that there is one class number per sample; `otherwise` names what else is allowed."""
    if not isinstance(target, Tensor):
        raise UserError(f"target must be a tensor of class numbers, not {type(target).__name__}")
    if tuple(target.shape) != shape or target.dtype not in _WHOLE:
        raise UserError(
            f"target must hold one class number per sample: shape {shape} and whole numbers{otherwise}, "
            f"not {tuple(target.shape)} of {target.dtype}"
        )


def check_class_numbers(numbers: Tensor, num_classes: int, ignore_index: int) -> None:
    """Check that class numbers (S,) are 0..K-1 or ignored."""
    kept = numbers[numbers != ignore_index] if can_look_at(numbers) else numbers[:0]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= num_classes):
        raise UserError(
            f"target must be a class number 0..{num_classes - 1} or ignore_index {ignore_index}; "
            f"found {int(kept.min())}..{int(kept.max())}"
        )


def check_probabilities(rows: Tensor) -> None:
    """Check that soft targets (S, K) are probabilities: at least 0, with sum 1."""
    if not can_look_at(rows):
        return
    wrong = ~((rows >= 0).all(1) & ((rows.sum(1) - 1).abs() <= _SUM_TOLERANCE))
    if bool(wrong.any()):
        sample = int(wrong.int().argmax())
        raise UserError(
            f"soft targets must be probabilities: at least 0, with sum 1; those of sample {sample} lie between "
            f"{rows[sample].min():g} and {rows[sample].max():g} and have sum {rows[sample].sum():g}"
        )


def can_look_at(values: Tensor) -> bool:
    """Whether values can be checked without waiting for a device."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()
