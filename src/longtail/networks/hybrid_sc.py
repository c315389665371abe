"""Hybrid-SC: a contrastive loss for the features and cross-entropy for the classifier; training shifts to the second.

    loss = alpha contrast + (1 - alpha) cross-entropy,    alpha = 1 - (epoch / epochs)²

The contrast of the variant "sc" is `longtail.losses.SupCon` on pairs of images. That of "psc" pulls an image towards
the prototype of its class and pushes it from the others, with unit vectors z of images and p of classes:

    loss_i = - z_i · p_y / t + log sum_{c ≠ y} exp(z_i · p_c / t)

Paper: Wang et al., Contrastive Learning based Hybrid Networks for Long-Tailed Image Classification,
CVPR 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.backbones import num_features
from longtail.data.loading import Batch
from longtail.errors import choose, number, whole_number
from longtail.files.tensors import single_at_least
from longtail.heads.kinds import SHORTEST, unit
from longtail.losses.supcon import SupCon
from longtail.networks.objective import Classifier, Objective, Progress, parabolic


def prototypical(features: Tensor, target: Tensor, prototypes: Tensor, temperature: float) -> Tensor:
    """PSC of unit features (N, D) with target (N,) and unit prototypes (K, D).

    As in the paper, the denominator does not include the prototype of the true class.
    """
    similarity = features @ prototypes.T / temperature
    true = similarity.gather(1, target.unsqueeze(1))
    others = similarity.scatter(1, target.unsqueeze(1), torch.finfo(similarity.dtype).min)
    return (others.logsumexp(1) - true[:, 0]).mean()


class HybridSC(Classifier):
    """Images (N, C, H, W) to logits (N, K): `head(features(images))`.

    Args:
        backbone: images to features (N, D).
        class_counts: (K,) training images per class; only K is used.
        variant: "sc" contrasts pairs of images, "psc" images with class prototypes.
        projection: width P of the contrastive branch.

    >>> from longtail.backbones import build_backbone
    >>> model = HybridSC(build_backbone("digits", in_channels=1), torch.tensor([90, 9, 3])).eval()
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    """

    prototypes: Tensor | None

    def __init__(
        self, backbone: nn.Module, class_counts: Tensor, *, variant: Literal["sc", "psc"] = "sc", projection: int = 128
    ) -> None:
        choose("variant", variant, ("sc", "psc"))
        width, out = num_features(backbone), whole_number("projection", projection)
        super().__init__(backbone, len(class_counts))
        self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
        directions = unit(torch.randn(len(class_counts), out)) if variant == "psc" else None
        self.register_parameter("prototypes", None if directions is None else nn.Parameter(directions))

    def project(self, features: Tensor) -> Tensor:
        """Features (N, D) to unit vectors (N, P) for the contrastive loss."""
        return unit(single_at_least(self.projection(features)))


class HybridSCObjective(Objective):
    """The loss of `HybridSC` on three batches of the full size: two views from instance sampling, one class-balanced.

    All go through the backbone together, so that batch-norm sees one mixture in training and at test. Of
    several processes each contrasts the images of its shard.

    Args:
        class_counts: (K,) training images per class.
        temperature: of the contrastive loss; the authors use 0.1 (for PSC on CIFAR-10-LT: 1).
    """

    def __init__(self, class_counts: Tensor, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = number("temperature", temperature, at_least=SHORTEST)
        self.contrast = SupCon(temperature=self.temperature)

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        network = cast(HybridSC, model)
        first, second, balanced = batches
        views = len(first.labels) + len(second.labels)
        features = network.features(torch.cat([batch.images for batch in batches]))
        classifier = F.cross_entropy(network.head(features[views:]), balanced.labels)
        alpha = parabolic(progress.epoch, progress.epochs)
        return alpha * self._contrast(network, features[:views], first.labels) + (1 - alpha) * classifier

    def _contrast(self, network: HybridSC, features: Tensor, target: Tensor) -> Tensor:
        """Contrastive loss of features (2 N, D): first views, then second views of the same images."""
        vectors = network.project(features)
        with torch.autocast(vectors.device.type, enabled=False):
            if network.prototypes is not None:
                return prototypical(vectors, target.repeat(2), unit(network.prototypes), self.temperature)
            return self.contrast(torch.stack(vectors.chunk(2), 1), target)
