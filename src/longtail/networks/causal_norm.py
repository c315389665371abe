"""Causal Norm (TDE): a normalised multi-head classifier; at test, the effect of the average feature is removed.

Features f and class vectors w are cut into H heads. In training, with `x = f / |f|` per head,

    logits = sum_h  tau / H * x_h · w_h / (|w_h| + gamma)

At test `x_h` becomes `x_h - alpha * cos(x_h, m_h) * m_h`, where m is the direction of the features'
moving average in training, `mean ← mu mean + mean of the batch` (only its direction matters). On CIFAR
mu is 0.9; elsewhere the authors let it rise as the learning rate falls, `mu = 1 - 0.1 min(50 lr, 1)`.

Paper: Tang et al., Long-Tailed Classification by Keeping the Good and Removing the Bad Momentum
Causal Effect, NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from longtail.backbones import num_features
from longtail.data.loading import Batch
from longtail.distributed import summed
from longtail.errors import UserError, choose, number, whole_number
from longtail.files.tensors import single_at_least
from longtail.heads.kinds import unit, unit_head
from longtail.networks.objective import Classifier, LossObjective, Progress

MOMENTUM = 0.9


class CausalNorm(Classifier):
    """Images (N, C, H, W) to logits (N, K): `head(features(images))`.

    Like batch-norm statistics, the moving average changes with every forward pass in training mode and
    does not change in evaluation mode.

    Args:
        backbone: images to features (N, D).
        class_counts: (K,) training images per class; only K is used.
        heads: number of heads; features and class vectors are split among them. Must divide D.
        tau: scale of the logits.
        gamma: added to the length of each class vector before the division; with 0 all become unit vectors.
        alpha: how much of the average feature's direction is subtracted at test; 0 keeps the trained logits.
            The authors use 3 for ImageNet-LT and Places-LT, 1.5 for CIFAR-100-LT and 1 for CIFAR-10-LT, and so do
            the recipes. The default for other data is 1, which removes exactly that direction: with 3, features
            that all lie near their mean (few classes, a small network) change their sign.

    >>> from longtail.backbones import build_backbone
    >>> model = CausalNorm(build_backbone("digits", in_channels=1), torch.tensor([90, 9, 3])).eval()
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    """

    mean_features: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        class_counts: Tensor,
        *,
        heads: int = 2,
        tau: float = 16.0,
        gamma: float = 1 / 32,
        alpha: float = 1.0,
    ) -> None:
        width, blocks = num_features(backbone), whole_number("heads", heads)
        if width % blocks:
            raise UserError(f"heads must divide the {width} features of the backbone; {heads} does not")
        scale, gamma = number("tau", tau, at_least=0) / blocks, number("gamma", gamma, at_least=0)
        head = partial(unit_head, scale=scale, blocks=blocks, gamma=gamma)
        super().__init__(backbone, len(class_counts), head=head)
        self.heads, self.alpha = blocks, number("alpha", alpha)
        self.register_buffer("mean_features", torch.zeros(width))
        self.momentum = MOMENTUM

    @torch.no_grad()
    def observe(self, features: Tensor) -> None:
        """Update the average with a batch of backbone features (N, D), summed over all processes."""
        rows = features.to(self.mean_features.dtype)
        total = summed(torch.cat([rows.sum(0), rows.new_tensor([len(rows)])]))
        self.mean_features.mul_(self.momentum).add_(total[:-1] / total[-1])

    def normalise(self, features: Tensor) -> Tensor:
        """Backbone features (N, D) to the input of the head (N, D), in training or at test."""
        x = unit(self._split(single_at_least(features)))
        if not self.training:
            direction = unit(self._split(self.mean_features))
            x = x - self.alpha * (x * direction).sum(-1, keepdim=True) * direction
        return x.flatten(1)

    def _split(self, x: Tensor) -> Tensor:
        """(…, D) to (…, heads, D / heads)."""
        return x.unflatten(-1, (self.heads, -1))

    def features(self, images: Tensor) -> Tensor:
        """The input of the linear head, (N, D)."""
        features = self.backbone(images)
        if self.training:
            self.observe(features)
        return self.normalise(features)


class CausalNormObjective(LossObjective):
    """Cross-entropy; it also sets the decay of the moving average of features.

    Args:
        class_counts: (K,) training images per class; not used.
        memory: "constant" decay (CIFAR), or "slowing": the average changes less as the learning rate falls.
    """

    def __init__(self, class_counts: Tensor, *, memory: Literal["constant", "slowing"] = "constant") -> None:
        super().__init__(nn.CrossEntropyLoss())
        self.memory = choose("memory", memory, ("constant", "slowing"))

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        if self.memory == "slowing":
            cast(CausalNorm, model).momentum = 1 - (1 - MOMENTUM) * min(50 * progress.lr, 1.0)
        return super().forward(model, batches, progress)
