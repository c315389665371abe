"""Supervised contrastive loss: views of one class attract each other, those of other classes repel.

    loss = mean over anchors a of  -mean over positives p of  log( exp(a.p / t) / sum_{k != a} exp(a.k / t) )

Positives of an anchor are all other views in the batch with its label. An anchor without one counts
as 0 and stays in the mean.

Paper: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020; half of Hybrid-SC (Wang et al.,
Contrastive Learning based Hybrid Networks for Long-Tailed Image Classification, CVPR 2021).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from longtail.core.arrays import single_at_least, without_autocast
from longtail.errors import UserError, choose, number
from longtail.losses.inputs import check_target


class SupCon(nn.Module):
    """Supervised contrastive loss of a batch; without labels pass `arange(N)` as target (SimCLR).

    Args:
        temperature: t, above 0.
        base_temperature: the loss is multiplied by temperature / base_temperature; None for 1. The
            released code has 0.07, a factor of 1.43 at t = 0.1.
        anchors: "all" views, or the "first" of each sample.

    Shapes: features (N, views, D) of unit length, target (N,) → scalar.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.1,
        base_temperature: float | None = None,
        anchors: Literal["all", "first"] = "all",
    ) -> None:
        super().__init__()
        self.temperature = number("temperature", temperature, above=0)
        base = self.temperature if base_temperature is None else number("base_temperature", base_temperature, above=0)
        self.factor = self.temperature / base
        self.anchors = choose("anchors", anchors, ("all", "first"))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        if features.ndim != 3:
            raise UserError(f"features must have shape (samples, views, dimensions), not {tuple(features.shape)}")
        size, views = features.shape[:2]
        check_target(target, size)
        if size * views < 2:
            raise UserError("one view of one sample has nothing to be compared with; use a larger batch or more views")
        # View by view, so that the first views are the first rows.
        rows = single_at_least(features).transpose(0, 1).flatten(0, 1)
        labels = target.repeat(views)
        anchors = len(rows) if self.anchors == "all" else size
        # At half precision a similarity of 1 is off by 0.004, and the temperature multiplies that.
        with without_autocast(rows):
            similarity = rows[:anchors] @ rows.T / self.temperature
        itself = torch.eye(anchors, len(rows), dtype=torch.bool, device=rows.device)
        log_probability = similarity - similarity.masked_fill(itself, -float("inf")).logsumexp(1, keepdim=True)
        positive = (labels[:anchors].unsqueeze(1) == labels) & ~itself
        per_anchor = log_probability.where(positive, 0).sum(1) / positive.sum(1).clamp(min=1)
        return -self.factor * per_anchor.mean()
