"""OLTR: features of rare classes are completed from a memory of class centroids.

The first half of training is plain; its class means become the memory. In the second half, with features f, centroids c
and the distance d to the nearest centroid, the head is a cosine classifier on

    v = 10 / d * (f + tanh(selector(f)) * sum_j softmax(hallucinator(f))_j c_j)

and modulated attention precedes the pooling: self-attention over the feature map, weighted by a second attention over
positions. For a feature map x with positions p, q (1x1 convolutions: query, key, value, mask):

    context_p = sum_q softmax_q(query_p · key_q) value_q
    output_p  = x_p + w_p * mask(context)_p,      w = softmax over p of linear(x)

The authors' linear layer maps 7x7 positions to 7x7 scores. Here x is averaged onto a grid of that
size before the layer, and the scores are interpolated back to the map: any map size works, and on
7x7 maps both steps are the identity.

Paper: Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.backbones import Backbone, num_features
from longtail.data.loading import Batch
from longtail.distributed import summed
from longtail.errors import number, whole_number
from longtail.files.tensors import single_at_least
from longtail.heads.kinds import SHORTEST, lengths, unit_head
from longtail.networks.objective import Objective, Progress


class ModulatedAttention(nn.Module):
    """Feature maps (N, C, H, W) to maps of the same shape; the identity at initialisation.

    Args:
        channels: C.
        reduction: queries, keys and values have C / reduction channels.
        grid: side of the grid on which positions are scored.
    """

    def __init__(self, channels: int, *, reduction: int = 2, grid: int = 7) -> None:
        super().__init__()
        inner = max(channels // reduction, 1)
        self.grid = grid
        self.query = nn.Conv2d(channels, inner, 1)
        self.key = nn.Conv2d(channels, inner, 1)
        self.value = nn.Conv2d(channels, inner, 1)
        self.mask = nn.Conv2d(inner, channels, 1, bias=False)
        self.place_scores = nn.Linear(grid * grid * channels, grid * grid)
        for convolution in (self.query, self.key, self.value):
            nn.init.kaiming_normal_(convolution.weight)
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
        nn.init.zeros_(self.mask.weight)

    def position_weights(self, x: Tensor) -> Tensor:
        """Weights (N, 1, H, W) of the positions; they sum to 1."""
        scores = self.place_scores(F.adaptive_avg_pool2d(x, self.grid).flatten(1))
        scores = F.interpolate(
            scores.view(-1, 1, self.grid, self.grid), size=x.shape[2:], mode="bilinear", align_corners=False
        )
        return scores.flatten(2).softmax(2).unflatten(2, x.shape[2:])

    def context(self, x: Tensor) -> Tensor:
        """Self-attention: the context of each position, (N, C, H, W)."""
        query, key, value = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        weights = (query.transpose(1, 2) @ key).softmax(2)
        return self.mask((value @ weights.transpose(1, 2)).unflatten(2, x.shape[2:]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position_weights(x) * self.context(x)


REACH = 10.0
MARGIN = 10.0
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
        self, backbone: nn.Module, class_counts: Tensor, *, scale: float = 16.0, grid: int = 7, layer: int | None = None
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
        """What the memory adds to direct features (N, D), (N, D)."""
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


def centroid_loss(features: Tensor, target: Tensor, centroids: Tensor, *, repel: float = 0.01) -> Tensor:
    """Pulls features (N, D) to the centroid of their class (target (N,)) and away from the others of (K, D).

    `sum_i |f_i - c_y|² / 2N + repel * max(0, 10 - sum_i sum_{j ≠ y} |f_i - c_j|² / NK)`
    """
    count, classes = len(features), len(centroids)
    attraction = (features - centroids[target]).square().sum()
    # Without an (N, K, D) array: the squared distances to K points sum to K times the squared distance to their
    # centre plus the sum of the squared distances of the points to the centre.
    centre = centroids.mean(0)
    every = classes * (features - centre).square().sum() + count * (centroids - centre).square().sum()
    return attraction / (2 * count) + repel * F.relu(MARGIN - (every - attraction) / (count * classes))


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
        self, class_counts: Tensor, *, centroid_weight: float = 0.01, first_rate: float = 1.0, second_rate: float = 0.1
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
