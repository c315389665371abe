"""Running class means of features during training, over all processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longtail.distributed import summed


class ClassMeans(nn.Module):
    """The mean feature of each class over about its last epoch.

    Each image of class c multiplies the old mean by `(1 - 1 / n_c)`. So a head class averages over many
    images, a class with one image keeps its latest feature, and a class that is not in the batch does not
    change.

    Args:
        class_counts: (K,) training images per class.
        num_features: D.
    """

    sums: Tensor
    weights: Tensor
    keep: Tensor

    def __init__(self, class_counts: Tensor, num_features: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(len(class_counts), num_features))
        self.register_buffer("weights", torch.zeros(len(class_counts)))
        self.register_buffer("keep", 1 - 1 / torch.as_tensor(class_counts).float().clamp(min=1), persistent=False)

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Update the means with features (N, D) and labels (N,)."""
        ones = features.new_ones(len(features), 1)
        rows = torch.cat([features, ones], 1).to(self.sums.dtype)
        batch = self.sums.new_zeros(len(self.sums), rows.shape[1]).index_add_(0, labels, rows)
        totals, counts = summed(batch).split([self.sums.shape[1], 1], 1)
        keep = self.keep.unsqueeze(1) ** counts
        self.sums.mul_(keep).add_((1 - keep) * totals / counts.clamp(min=1))
        self.weights.mul_(keep[:, 0]).add_(1 - keep[:, 0])

    def means(self) -> Tensor:
        """(K, D); zero for a class that was never seen."""
        seen = self.weights > 0
        return self.sums / torch.where(seen, self.weights, 1).unsqueeze(1)
