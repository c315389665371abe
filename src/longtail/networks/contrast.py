"""Contrastive losses on unit vectors: pull images of one class together, push the others away.

SC, over all views z of the batch:  loss_i = - mean over positives j of log softmax_{k ≠ i}(z_i · z_k / t)_j
PSC, with a prototype p_c per class: loss_i = - z_i · p_y / t + log sum_{c ≠ y} exp(z_i · p_c / t)

Papers: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020; Wang et al., Contrastive
Learning based Hybrid Networks for Long-Tailed Image Classification, CVPR 2021 (PSC).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SupCon(nn.Module):
    """Supervised contrastive loss; an image without a positive counts as 0.

    Args:
        temperature: t.

    Call with features (N, views, D) of length one and target (N,).
    """

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        views = features.shape[1]
        vectors = features.transpose(0, 1).flatten(0, 1)
        labels = target.repeat(views)
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
        similarity = vectors @ vectors.T / self.temperature
        # The lowest number, not -inf: a lone image would have no finite log-softmax.
        others = similarity.masked_fill(itself, torch.finfo(similarity.dtype).min)
        log_probability = torch.where(positive, others.log_softmax(1), 0)
        return -(log_probability.sum(1) / positive.sum(1).clamp(min=1)).mean()


def prototypical(features: Tensor, target: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """PSC of unit features (N, D) with target (N,) and unit prototypes (K, D).

    As in the paper, the image's own prototype is not among those it is pushed away from.
    """
    similarity = features @ prototypes.T / temperature
    own = similarity.gather(1, target.unsqueeze(1))
    others = similarity.scatter(1, target.unsqueeze(1), torch.finfo(similarity.dtype).min)
    return (others.logsumexp(1) - own[:, 0]).mean()
