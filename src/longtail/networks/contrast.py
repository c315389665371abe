"""Prototypical contrast: pull an image towards the prototype of its class, push it from the others.

    loss_i = - z_i · p_y / t + log sum_{c ≠ y} exp(z_i · p_c / t)

with unit vectors z of images and p of classes. `longtail.losses.SupCon` does the same with pairs of images.

Paper: Wang et al., Contrastive Learning based Hybrid Networks for Long-Tailed Image Classification,
CVPR 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prototypical(features: Tensor, target: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """PSC of unit features (N, D) with target (N,) and unit prototypes (K, D).

    As in the paper, the denominator does not include the prototype of the image's own class.
    """
    similarity = features @ prototypes.T / temperature
    own = similarity.gather(1, target.unsqueeze(1))
    others = similarity.scatter(1, target.unsqueeze(1), torch.finfo(similarity.dtype).min)
    return (others.logsumexp(1) - own[:, 0]).mean()
