"""Supervised contrastive loss: pulls views of the same class together and pushes views of other classes apart.

    loss = mean over anchors a of  -mean over positives p of  log( exp(a.p / t) / sum_{k != a} exp(a.k / t) )

The positives of an anchor are all other views in the batch with the same label. An anchor without positives
adds 0 to the mean.

Paper: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020; half of Hybrid-SC (Wang et al.,
Contrastive Learning based Hybrid Networks for Long-Tailed Image Classification, CVPR 2021).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from longtail.errors import UserError, choose, number
from longtail.files.tensors import single_at_least, without_autocast
from longtail.losses.base import IGNORE_INDEX, Loss, Reduction
from longtail.losses.inputs import check_target


class SupCon(Loss):
    """Supervised contrastive loss of a batch; without labels pass `arange(N)` as target (SimCLR).

    It takes features, not logits: use it in addition to a cross-entropy, not instead of one.

    Args:
        temperature: t, above 0.
        base_temperature: the loss is multiplied by temperature / base_temperature; None means a factor of 1. The
            released code uses 0.07, a factor of 1.43 at t = 0.1.
        anchors: "all" views, or the "first" of each sample.
        reduction: "mean" over the anchors, "sum", or "none", (N, views) or, with first views, (N, 1).
        ignore_index: samples with this target are ignored: they are neither anchors nor compared with anchors.

    Shapes: features (N, views, D) of unit length, target (N,) → scalar.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.1,
        base_temperature: float | None = None,
        anchors: Literal["all", "first"] = "all",
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        super().__init__(reduction=reduction, ignore_index=ignore_index)
        self.temperature = number("temperature", temperature, above=0)
        given = base_temperature is not None
        self.base_temperature = number("base_temperature", base_temperature, above=0) if given else self.temperature
        self.anchors = choose("anchors", anchors, ("all", "first"))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        if features.ndim != 3:
            raise UserError(f"features must have shape (samples, views, dimensions), not {tuple(features.shape)}")
        size, views = features.shape[:2]
        check_target(target, (size,))
        if size * views < 2:
            what = "the batch has one view of one sample" if size else "the batch is empty"
            raise UserError(f"{what}; SupCon needs at least two views: use a larger batch or more views")
        # Ordered by view, so that the first views are the first rows.
        rows = single_at_least(features).transpose(0, 1).flatten(0, 1)
        labels = target.long().repeat(views)
        anchors = len(rows) if self.anchors == "all" else size
        # In half precision a similarity of 1 has an error of 0.004, and the temperature multiplies it.
        with without_autocast(rows):
            similarity = rows[:anchors] @ rows.T / self.temperature
        ignored = labels == self.ignore_index
        unseen = torch.eye(anchors, len(rows), dtype=torch.bool, device=rows.device) | ignored
        log_probability = similarity - similarity.masked_fill(unseen, -float("inf")).logsumexp(1, keepdim=True)
        positive = (labels[:anchors].unsqueeze(1) == labels) & ~unseen
        per_anchor = log_probability.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)
        losses = -self.temperature / self.base_temperature * per_anchor
        return self.reduce(losses.view(-1, size).T, ignored[:anchors].view(-1, size).T)
