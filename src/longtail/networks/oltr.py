"""OLTR: a memory of class centroids completes the features; features far from all centroids get small logits.

With direct features f (after modulated attention, see `attention`), centroids M (K, D) and d the
distance from f to the nearest of them:

    v      = 10 / d * (f + tanh(selector(f)) * softmax(hallucinator(f)) M)
    logits = 16 * v / (1 + |v|) · W / |W|
    loss   = CE(logits, y) + 0.01 * centroid_loss(f, y, M)

The authors train in two stages; a run here does both, each in half of its steps (theirs: 30 + 60 epochs
on ImageNet-LT, 30 + 30 on Places-LT). In the first stage f has no attention, the hallucinator is a plain
classifier, and the mean feature of each class is tracked. In the second stage the means become the
centroids, the learning rate schedule restarts, and classes are drawn equally often (sampler `deferred`). As
in the released code, features and centroids are then trained with a tenth of the classifier's learning rate;
on photographs a linear layer with 512 outputs (`fc_add` in the released code) follows the backbone.

Two differences from the released code: the centroids follow the exact gradient of their loss (the released code
writes the gradient by hand and ignores the weight 0.01), and the learning rate follows a cosine instead of steps.

Paper: Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.backbones import Backbone, num_features
from longtail.backbones.inference import evaluating
from longtail.core.arrays import single_at_least
from longtail.data.loading import Batch
from longtail.errors import number, whole_number
from longtail.networks.attention import ModulatedAttention
from longtail.networks.feature_means import ClassMeans
from longtail.networks.objective import Objective, Progress
from longtail.networks.vectors import SHORTEST, lengths, unit_head

REACH = 10.0
MARGIN = 10.0
UNKNOWN = -1
FEATURE_PARTS = ("backbone", "attention", "layer", "centroids")


class OLTR(nn.Module):
    """Images (N, C, H, W) to logits (N, K): with the memory on, `head(features(images))`.

    Args:
        backbone: images to feature maps.
        class_counts: (K,) training images per class.
        scale: of the cosine head.
        grid: side of the grid on which the attention scores positions; see `ModulatedAttention`.
        layer: width of a linear layer with ReLU after the backbone; None for no layer. The authors use 512.

    The attribute `memory_on` is False in the first stage and True in the second; it is saved with the weights.

    >>> from longtail.backbones import build_backbone
    >>> model = OLTR(build_backbone("digits", in_channels=1), torch.tensor([90, 9, 3])).eval()
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        backbone: nn.Module,
        class_counts: Tensor,
        *,
        scale: float = 16.0,
        grid: int = 7,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        channels, classes = num_features(backbone), len(class_counts)
        width = channels if layer is None else whole_number("layer", layer)
        self.backbone = backbone
        self.attention = ModulatedAttention(channels, grid=whole_number("grid", grid))
        self.layer = nn.Identity() if layer is None else nn.Sequential(nn.Linear(channels, width), nn.ReLU())
        self.hallucinator = nn.Linear(width, classes)
        self.selector = nn.Linear(width, width)
        self.head = unit_head(width, classes, scale=number("scale", scale, at_least=0))
        self.centroids = nn.Parameter(torch.zeros(classes, width))
        self.class_means = ClassMeans(class_counts, width)
        self.memory_on = False

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.memory_on)

    def set_extra_state(self, state: Tensor) -> None:
        self.memory_on = bool(state)

    @torch.no_grad()
    def switch_memory_on(self) -> None:
        """Start the second stage: the class means become trainable centroids."""
        self.centroids.copy_(self.class_means.means())
        self.memory_on = True

    def direct_features(self, images: Tensor) -> Tensor:
        """Features (N, D) before the memory is used."""
        feature_map = cast(Backbone, self.backbone).feature_map(images)
        if self.memory_on:
            feature_map = self.attention(feature_map)
        return self.layer(feature_map.mean(dim=(2, 3)))

    def infused(self, direct: Tensor) -> Tensor:
        """The part (N, D) that the memory adds to direct features (N, D)."""
        remembered = self.hallucinator(direct).softmax(1) @ self.centroids.detach()
        return torch.tanh(self.selector(direct)) * remembered

    def embed(self, direct: Tensor) -> Tensor:
        """Direct features (N, D) to the input of the head: v / (1 + |v|), (N, D)."""
        with torch.autocast(direct.device.type, enabled=False):
            direct = single_at_least(direct)
            whole = direct + self.infused(direct)
            distance = lengths(direct - self._nearest(direct))
            # v / (1 + |v|) with numerator and denominator multiplied by the distance d, because d may be 0.
            return REACH * whole / (distance + REACH * lengths(whole)).clamp(min=SHORTEST)

    @torch.no_grad()
    def _nearest(self, direct: Tensor) -> Tensor:
        """The centroid nearest to each of the features (N, D)."""
        return self.centroids[
            torch.cdist(direct, self.centroids, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
        ]

    def features(self, images: Tensor) -> Tensor:
        """The input of the linear head, (N, D)."""
        direct = self.direct_features(images)
        return self.embed(direct) if self.memory_on else direct

    def forward(self, images: Tensor) -> Tensor:
        return (self.head if self.memory_on else self.hallucinator)(self.features(images))

    def predict_open(self, images: Tensor, threshold: float = 0.1) -> Tensor:
        """Predicted classes (N,); -1 (unknown) if no class reaches the probability `threshold`."""
        with evaluating(self):
            probability, best = self(images).softmax(1).max(1)
        return torch.where(probability < threshold, UNKNOWN, best)


def centroid_loss(features: Tensor, target: Tensor, centroids: Tensor, *, repel: float = 0.01) -> Tensor:
    """Pulls features (N, D) to the centroid of their class (target (N,)) and away from the others of (K, D).

    `sum_i |f_i - c_y|² / 2N + repel * max(0, 10 - sum_i sum_{j ≠ y} |f_i - c_j|² / NK)`
    """
    count, classes = len(features), len(centroids)
    own = (features - centroids[target]).square().sum()
    # Without an (N, K, D) array: the squared distances to K points sum to K times the squared distance to their
    # centre plus the sum of their own squared distances to the centre.
    centre = centroids.mean(0)
    every = classes * (features - centre).square().sum() + count * (centroids - centre).square().sum()
    return own / (2 * count) + repel * F.relu(MARGIN - (every - own) / (count * classes))


class OLTRObjective(Objective):
    """The loss of `OLTR`; switches its memory on at half of the steps.

    Args:
        class_counts: (K,) training images per class.
        centroid_weight: weight of the centroid loss.
        first_rate: learning rate of the features in the first stage, relative to the classifier's.
        second_rate: learning rate of features and centroids in the second stage, relative to the classifier's.
    """

    stages = 2

    def __init__(
        self,
        class_counts: Tensor,
        *,
        centroid_weight: float = 0.01,
        first_rate: float = 1.0,
        second_rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.centroid_weight = number("centroid_weight", centroid_weight, at_least=0)
        self.first_rate = number("first_rate", first_rate, at_least=0)
        self.second_rate = number("second_rate", second_rate, at_least=0)

    def rate(self, part: str, progress: Progress) -> float:
        if part not in FEATURE_PARTS:
            return 1.0
        return self.first_rate if progress.fraction < 0.5 else self.second_rate

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        network = cast(OLTR, model)
        (batch,) = batches
        if progress.fraction >= 0.5 and not network.memory_on:
            network.switch_memory_on()
        direct = network.direct_features(batch.images)
        if not network.memory_on:
            network.class_means.add(direct, batch.labels)
            return F.cross_entropy(network.hallucinator(direct), batch.labels) + _idle(network)
        loss = F.cross_entropy(network.head(network.embed(direct)), batch.labels)
        with torch.autocast(direct.device.type, enabled=False):
            return loss + self.centroid_weight * centroid_loss(single_at_least(direct), batch.labels, network.centroids)


def _idle(network: OLTR) -> Tensor:
    """0, computed from all parameters of the second stage: DistributedDataParallel waits for a gradient of each."""
    modules = (network.attention, network.selector, network.head)
    parameters = [network.centroids, *(parameter for module in modules for parameter in module.parameters())]
    return 0 * torch.stack([parameter.sum() for parameter in parameters]).sum()
