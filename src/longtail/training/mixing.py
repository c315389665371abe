"""Mixing images: every image of a batch is combined with another one, and their labels in the same proportion.

    mixup    x = lam x_i + (1 - lam) x_j,    y = lam y_i + (1 - lam) y_j,    lam ~ Beta(alpha, alpha)
    cutmix   x = x_i with a box of x_j whose sides are sqrt(1 - lam) of the image's; then lam is x_i's share of it
    remix    images as in mixup; lam of the labels is 0 if n_i >= 3 n_j and lam < 1/2, and 1 if n_j >= 3 n_i and
             1 - lam < 1/2: where classes differ in size, the smaller one gets the label more often

As in the released code, a batch has one lam and one box. They are a function of seed and step, so all processes and
micro-batches of a step have the same. Image 2i is paired with image 2i + 1: the order of the images is random already,
and pairs stay together when a batch is divided.

Papers: Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018; Yun et al., CutMix, ICCV 2019;
Chou et al., Remix: Rebalanced Mixup, ECCV 2020 workshops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.data.loading import Batch

KAPPA, TAU = 3.0, 0.5  # of Remix


@dataclass(frozen=True)
class Mixing:
    """Mixes the images of batches.

    Args:
        kind: mixup, cutmix or remix.
        alpha: of the Beta distribution that the share lam is drawn from.
        seed: of the run.
        class_counts: (K,) training images per class, on the device of the batches.
    """

    kind: str
    alpha: float
    seed: int
    class_counts: Tensor

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch with mixed images and soft targets (N, K); an image without a partner is mixed with itself."""
        rng = np.random.default_rng((*b"mix", self.seed, step))
        share = float(rng.beta(self.alpha, self.alpha))
        size = len(batch.images)
        partner = (torch.arange(size, device=batch.images.device) ^ 1).clamp(max=size - 1)
        others = batch.images[partner]
        if self.kind == "cutmix":
            images, share = cut(batch.images, others, share, rng.random(2))
        else:
            images = share * batch.images + (1 - share) * others
        first, second = batch.labels, batch.labels[partner]
        shares = torch.full_like(images[:, 0, 0, 0], share)
        if self.kind == "remix":
            shares = remix(shares, self.class_counts[first], self.class_counts[second])
        targets = [F.one_hot(labels, len(self.class_counts)) for labels in (first, second)]
        mixed = shares.unsqueeze(1) * targets[0] + (1 - shares).unsqueeze(1) * targets[1]
        return replace(batch, images=images, labels=mixed)


def cut(images: Tensor, others: Tensor, share: float, centre: np.ndarray) -> tuple[Tensor, float]:
    """Images (N, C, H, W) with one box of the other images, and the share of the pixels outside the box.

    `centre` (2,) is the middle of the box, from 0 to 1; where the box reaches over the edge it is cut off.
    """
    ranges = []
    for length, position in zip(images.shape[2:], centre, strict=True):
        half, middle = int(length * math.sqrt(1 - share)) // 2, int(length * position)
        ranges.append(slice(max(middle - half, 0), min(middle + half, length)))
    mixed = images.clone()
    mixed[:, :, ranges[0], ranges[1]] = others[:, :, ranges[0], ranges[1]]
    area = (ranges[0].stop - ranges[0].start) * (ranges[1].stop - ranges[1].start)
    return mixed, 1 - area / (images.shape[2] * images.shape[3])


def remix(shares: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Shares of the first label (N,), from those of the image and the counts of both classes (N,)."""
    to_second = (first >= KAPPA * second) & (shares < TAU)
    to_first = (second >= KAPPA * first) & (1 - shares < TAU)
    return shares.masked_fill(to_second, 0.0).masked_fill(to_first, 1.0)
