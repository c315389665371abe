"""Modulated attention: self-attention over a feature map, weighted by a second attention over positions.

For a feature map x with positions p, q (1x1 convolutions: query, key, value, mask):

    context_p = sum_q softmax_q(query_p · key_q) value_q
    output_p  = x_p + w_p * mask(context)_p,      w = softmax over p of linear(x)

The authors' linear layer maps 7x7 positions to 7x7 scores. Here x is averaged onto a grid of that
size before the layer, and the scores are interpolated back to the map: any map size works, and on
7x7 maps both steps are the identity.

Paper: Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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

    def places(self, x: Tensor) -> Tensor:
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
        return x + self.places(x) * self.context(x)
