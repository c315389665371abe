"""BBN: one branch learns from uniformly drawn images, one mostly from rare classes; training shifts to the second.

The branches share all layers but the last block. With features f of a uniform image (label y) and
g of an image from the reversed sampler (label v), and `alpha = 1 - (epoch / epochs)²`,

    logits = head(2 [alpha f, (1 - alpha) g])
    loss   = alpha CE(logits, y) + (1 - alpha) CE(logits, v)

At test both branches see the same image and `logits = head([f, g])`, which is alpha 1/2.

On CIFAR the authors train for 200 epochs with weight decay 2e-4 and a learning rate of 0.1 that falls in steps. Here
length, weight decay and learning rate are those of the recipe, so that all methods have the same budget.

Paper: Zhou et al., BBN: Bilateral-Branch Network with Cumulative Learning for Long-Tailed Visual
Recognition, CVPR 2020.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.backbones import Backbone, num_features
from longtail.data.loading import Batch
from longtail.networks.objective import Objective, Progress, parabolic

# For 90 or 180 epochs, the released code divides by 100 or 200 instead.
STRETCHED = {90: 100, 180: 200}


def cumulative_alpha(epoch: int, epochs: float) -> float:
    """Weight of the conventional branch; `epoch` counts from 0.

    >>> cumulative_alpha(0, 200), cumulative_alpha(100, 200), cumulative_alpha(50, 90)
    (1.0, 0.75, 0.75)
    """
    return parabolic(epoch, STRETCHED.get(round(epochs), epochs))


class BBN(nn.Module):
    """Images (N, C, H, W) to logits (N, K): `head(features(images))`, both branches equally.

    Args:
        backbone: its last block is the conventional branch; a second last block is added as the other branch.
        class_counts: (K,) training images per class; only K is used.

    >>> from longtail.backbones import build_backbone
    >>> model = BBN(build_backbone("digits", in_channels=1), torch.tensor([90, 9, 3])).eval()
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(self, backbone: nn.Module, class_counts: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.rebalancing_block = _another(self._parts.last_block)
        self.head = nn.Linear(2 * num_features(backbone), len(class_counts))
        # Published weights have one last block: both branches start from it.
        backbone.register_load_state_dict_post_hook(self._copy_last_block)

    @property
    def _parts(self) -> Backbone:
        return cast(Backbone, self.backbone)

    def _copy_last_block(self, *_: object) -> None:
        self.rebalancing_block.load_state_dict(self._parts.last_block.state_dict())

    def conventional(self, images: Tensor) -> Tensor:
        """Features (N, D) of the branch for uniformly drawn images."""
        return self.backbone(images)

    def rebalancing(self, images: Tensor) -> Tensor:
        """Features (N, D) of the branch for images of rare classes."""
        return _pool(self.rebalancing_block(self._parts.early_map(images)))

    def mix(self, conventional: Tensor, rebalancing: Tensor, alpha: float) -> Tensor:
        """Logits (N, K) in training, from features (N, D) of each branch."""
        return self.head(2 * torch.cat([alpha * conventional, (1 - alpha) * rebalancing], 1))

    def features(self, images: Tensor) -> Tensor:
        """Features (N, 2 D) of both branches."""
        early = self._parts.early_map(images)
        return torch.cat([_pool(self._parts.last_block(early)), _pool(self.rebalancing_block(early))], 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def mixed_loss(logits: Tensor, conventional_target: Tensor, rebalancing_target: Tensor, alpha: float) -> Tensor:
    """Cross-entropy of mixed logits (N, K) with both labels, mixed as the features are."""
    losses = [F.cross_entropy(logits, target) for target in (conventional_target, rebalancing_target)]
    return alpha * losses[0] + (1 - alpha) * losses[1]


class BBNObjective(Objective):
    """The loss of `BBN` on a batch of the instance sampler and one of the reversed sampler, both full size.

    The two batches go through the network separately, as in the released code, so batch-norm does not mix them.
    """

    def __init__(self, class_counts: Tensor) -> None:
        super().__init__()

    def forward(self, model: nn.Module, batches: Sequence[Batch], progress: Progress) -> Tensor:
        network = cast(BBN, model)
        uniform, reverse = batches
        alpha = cumulative_alpha(progress.epoch, progress.epochs)
        logits = network.mix(network.conventional(uniform.images), network.rebalancing(reverse.images), alpha)
        return mixed_loss(logits, uniform.labels, reverse.labels, alpha)


def _pool(feature_map: Tensor) -> Tensor:
    return feature_map.mean(dim=(2, 3))


@torch.no_grad()
def _another(block: nn.Module) -> nn.Module:
    """A copy of a block with new random weights."""
    fresh = copy.deepcopy(block)
    for module in fresh.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.copy_(torch.randn_like(module.weight) * module.weight.std())
    return fresh
