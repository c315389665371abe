"""Accuracy by shots as a torchmetrics metric, accumulated over batches and processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from longtail.errors import UserError
from longtail.files.tensors import as_array
from longtail.metrics.scores import shot_accuracy


class ShotAccuracy(Metric):
    """Balanced accuracy, and the mean accuracy of many-, medium- and few-shot classes.

    The result of `compute()` has no entry for a group without classes in the samples.

    Args:
        class_counts: (K,) training samples per class.

    >>> metric = ShotAccuracy([200, 50, 5])
    >>> metric.update(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2]))
    >>> {name: round(float(value), 2) for name, value in metric.compute().items()}
    {'balanced': 0.67, 'many': 1.0, 'medium': 1.0, 'few': 0.0}
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    hits: Tensor
    totals: Tensor

    def __init__(self, class_counts: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.class_counts = as_array(class_counts)
        zeros = torch.zeros(len(self.class_counts), dtype=torch.int64)
        self.add_state("hits", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("totals", zeros.clone(), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Logits or probabilities (N, K), or classes (N,), and labels (N,)."""
        classes = len(self.class_counts)
        if preds.ndim == 2 and preds.shape[1] != classes:
            raise UserError(f"predictions have {preds.shape[1]} classes, class_counts has {classes}")
        best = preds.argmax(1) if preds.ndim == 2 else preds
        if best.shape != target.shape or target.ndim != 1:
            raise UserError(f"predictions {tuple(preds.shape)} and labels {tuple(target.shape)} do not fit together")
        if len(target) and not 0 <= int(target.min()) <= int(target.max()) < classes:
            raise UserError(f"labels are {int(target.min())}..{int(target.max())}, classes are 0..{classes - 1}")
        self.totals += torch.bincount(target, minlength=classes)
        self.hits += torch.bincount(target[best == target], minlength=classes)

    def compute(self) -> dict[str, Tensor]:
        """Shares between 0 and 1."""
        per_class = (self.hits.double() / self.totals).cpu().numpy()  # nan for a class without samples
        groups = shot_accuracy(per_class, self.class_counts)
        seen = per_class[self.totals.cpu().numpy() > 0]
        named = {"balanced": float(seen.mean()) if len(seen) else None, **groups}
        return {name: torch.tensor(value, device=self.device) for name, value in named.items() if value is not None}
