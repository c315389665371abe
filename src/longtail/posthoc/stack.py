"""A stack of scores, mixed by likelihood on images that the network has not seen.

    logits = A eta + l1 (LDA - eta) + l2 (Q - eta) + c log pi + v z(log |W_j|)

with z standardised over the classes. Each number has a Gaussian prior, so the problem is strictly
convex: Newton's method needs a handful of passes over the held-out scores, whatever their number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.posthoc.solver import Solution

STEPS = 50
LAST_STEP = 1e-9  # expected decrease, relative to the value


@dataclass(frozen=True)
class Prior:
    """What is believed of a number before any held-out image is seen: a mean and a standard deviation."""

    mean: float
    deviation: float


# Frozen on digits, one ResNet-32 and one small network for CIFAR-100-LT.
PRIORS: dict[str, Prior] = {
    "model": Prior(1 / 1.4, 0.25),
    "lda": Prior(0.1, 0.2),
    "balanced": Prior(0.1, 0.2),
    "prior": Prior(-0.45, 0.2),
    "norms": Prior(0.0, 0.2),
}


@dataclass(frozen=True)
class Held:
    """Some held-out samples as the fit sees them, in float64.

    Args:
        labels: (B,) among the classes that are present.
        weights: (B,).
        scores: (S, B, K) what is mixed per sample and class.
    """

    labels: Tensor
    weights: Tensor
    scores: Tensor


def sample_weights(labels: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """(M,) weights of held-out samples, summing to their effective number.

    They make the fit a posterior at the prior pi^(1/2), half-way between the training set and balance: w is
    proportional to n^(-1/2) where the samples are distributed like training, in general to n^(1/2) / m with m
    their own counts.
    """
    own = np.bincount(labels, minlength=len(class_counts))
    counts = class_counts.astype(np.float64)
    of_class = counts**-0.5 if like_training(own, counts) else np.sqrt(counts) / np.maximum(own, 1)
    weights = of_class[labels]
    return np.asarray(weights * (weights.sum() / np.square(weights).sum()))


def like_training(own: np.ndarray, class_counts: np.ndarray) -> bool:
    """Whether counts look like a draw from training images: no class is off by more than chance and rounding.

    >>> counts = np.array([200, 80, 5])
    >>> like_training(np.array([20, 8, 1]), counts), like_training(np.full(3, 9), counts)
    (True, False)
    """
    present = own > 0
    expected = class_counts[present] * own.sum() / class_counts[present].sum()
    # A split that leaves every class at least one image is off by up to one image per class.
    off = np.maximum(np.abs(own[present] - expected) - 1, 0)
    return bool((np.square(off) / expected).sum() <= 3 * present.sum())


class Stack:
    """The problem: numbers called `names` that mix scores per sample and class, then vectors per class.

    Args:
        names: of the numbers, scores first.
        held: goes through this process's share of the samples once.
        vectors: (V, K) float64.
        world: processes that share the samples.
    """

    def __init__(
        self, names: Sequence[str], held: Callable[[], Iterable[Held]], vectors: Tensor, world: World = SINGLE_PROCESS
    ) -> None:
        self.names = names
        self.held = held
        self.vectors = vectors
        self.world = world
        self.means = np.array([PRIORS[name].mean for name in names])
        self.precision = np.array([PRIORS[name].deviation for name in names]) ** -2

    def solve(self) -> Solution:
        """Newton's method with halved steps; few passes, because the prior's means are a good start."""
        began = time.perf_counter()
        x, passes, converged = self.means.copy(), 1, False
        value, gradient, hessian = self.evaluate(x)
        while passes < STEPS and not converged:
            direction = np.linalg.solve(hessian, gradient)
            decrease, length = float(gradient @ direction), 1.0
            if decrease <= LAST_STEP * max(abs(value), 1.0):
                # So near the optimum the function is the parabola that the step assumes: no pass to look again.
                x, value, converged = x - direction, value - 0.5 * decrease, True
                break
            found = self.evaluate(x - direction)
            passes += 1
            while found[0] > value - 1e-4 * length * decrease and length > 1e-6 and passes < STEPS:
                length /= 2
                found = self.evaluate(x - length * direction)
                passes += 1
            x, (value, gradient, hessian) = x - length * direction, found
        return Solution(x, value, converged, passes, None, time.perf_counter() - began)

    def evaluate(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Value, gradient (J,) and Hessian (J, J) of the negative log posterior; one pass over the samples."""
        size = len(x)
        totals = torch.zeros(1 + size + size * size, dtype=torch.float64)  # one exchange between processes
        value, gradient, hessian = totals[:1], totals[1 : 1 + size], totals[1 + size :].view(size, size)
        numbers, count = torch.from_numpy(x), size - len(self.vectors)
        constant = numbers[count:] @ self.vectors
        for part in self.held():
            flat, own = part.scores.flatten(1), part.labels.unsqueeze(1)
            logits = (numbers[:count] @ flat).view(len(own), -1).add_(constant)
            log_shares = logits.log_softmax(1)
            value -= (part.weights * log_shares.gather(1, own).squeeze(1)).sum()
            shares = log_shares.exp_().mul_(part.weights.unsqueeze(1))
            products = shares * part.scores
            expected = torch.cat([products.sum(2), self.vectors @ shares.T])  # (J, B), times the weights
            truth = torch.cat(
                [part.scores.gather(2, own.expand(count, -1, -1)).squeeze(2), self.vectors[:, part.labels]]
            )
            gradient += (expected - truth * part.weights).sum(1)
            hessian -= (expected / part.weights) @ expected.T
            hessian[:count, :count] += products.flatten(1) @ flat.T
            cross = products.sum(1) @ self.vectors.T
            hessian[:count, count:] += cross
            hessian[count:, :count] += cross.T
            hessian[count:, count:] += (self.vectors * shares.sum(0)) @ self.vectors.T
        self.world.sum(totals)
        pull = x - self.means
        return (
            float(value) + 0.5 * float((self.precision * pull) @ pull),
            gradient.numpy() + self.precision * pull,
            hessian.numpy() + np.diag(self.precision),
        )
