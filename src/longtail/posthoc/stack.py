"""A stack of scores, mixed by likelihood on images that the network has not seen.

    logits = A eta + l1 (LDA - eta) + l2 (Q - eta) + c log pi + v z(log |W_j|)

with z standardised over the classes. Each number has a Gaussian prior, so the problem is strictly
convex: Newton's method needs a handful of passes over the held-out scores, whatever their number.
Scores are kept in float32, sums in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.posthoc.solver import Solution

STEPS = 50
SHORTEST = 1e-9
# Expected decrease from which on the function is the parabola that a step assumes: no pass looks again. What is left
# after a step of 0.02 nats is about a thousandth of a standard error of the numbers.
LAST_STEP, LAST_EXACT_STEP = 0.02, 1e-8
ROUNDING = 1e-6  # of a value, relative to the samples' number: float32 scores tell no smaller decrease
BLOCK = 1 << 17  # scores of one head worked on at a time: they stay in the processor's cache
SMALLEST, LARGEST = 1e-12, 1e12  # scores whose products float32 numbers still hold
# Many images of few classes look as if they told the slope of the biases well, but each class has a bias of its own:
# where other classes are missing, what is usual for networks says more of them than that slope.
EXTRAPOLATED = 0.1  # times the deviations of the numbers of class vectors
FAR = 3.0  # deviations from the prior's mean
FLAT = 0.05  # curvature of the model's own factor for scores that hardly tell classes apart
UNIT_STEP = float(np.log(4))
SAME_UNIT = float(np.log(3))

Evaluation = tuple[float, np.ndarray, np.ndarray]  # value, gradient (J,), Hessian (J, J)


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
    """Some held-out samples as the fit sees them.

    Args:
        labels: (B,) among the classes that are present.
        weights: (B,) float64.
        scores: (S, K, B) what is mixed, minus the score of the sample's own class.
    """

    labels: Tensor
    weights: Tensor
    scores: Tensor

    @classmethod
    def of(cls, labels: Tensor, weights: Tensor, scores: Tensor) -> Self:
        """Of scores (S, K, B) by the model and by other heads: of these the difference from the model is mixed."""
        scores = scores - scores.gather(1, labels.expand(len(scores), 1, -1))
        scores[1:] -= scores[0].clone()
        return cls(labels, weights, scores.contiguous())

    def blocks(self) -> Iterable[Held]:
        """The samples, some at a time."""
        size = max(BLOCK // self.scores.shape[1], 1)
        if len(self.labels) <= size:
            return [self]
        parts = (slice(start, start + size) for start in range(0, len(self.labels), size))
        return [Held(self.labels[p], self.weights[p], self.scores[:, :, p].contiguous()) for p in parts]


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
        extrapolated: whether classes are missing, for which the numbers of the vectors are extrapolated.
    """

    def __init__(
        self,
        names: Sequence[str],
        held: Callable[[], Iterable[Held]],
        vectors: Tensor,
        world: World = SINGLE_PROCESS,
        *,
        extrapolated: bool = False,
    ) -> None:
        self.names = names
        self.held = held
        self.vectors = vectors
        self.world = world
        self.count = len(names) - len(vectors)
        self.total = 0.0  # weight of all samples, known after a pass
        self.curvature = 0.0  # of the model's own factor in the last pass, per sample
        self.passes = 0
        self.means = np.array([PRIORS[name].mean for name in names])
        deviations = np.array([PRIORS[name].deviation for name in names])
        deviations[self.count :] *= EXTRAPOLATED if extrapolated else 1.0
        self.precision = deviations**-2

    def solve(self, *, exact: bool = False) -> Solution:
        """Newton's method; few passes, because the prior's means are a good start.

        The priors are those of logits, logarithms of probabilities. Scores that are not (cosines without a scale,
        logits times a thousand) are seen by a start that is worse than no model or hardly differs from none, or by a
        fit far from its prior: then the priors are taken in the unit in which the scores are logits.

        Args:
            exact: to the last digits, not to a small part of the numbers' own standard errors.
        """
        began = time.perf_counter()
        self.passes = 0
        at_means = self.evaluate(self.means)
        flat = 0 < self.curvature < FLAT and at_means[0] > 0.5 * self._no_model
        start = -0.5 * float(np.log(self.curvature)) if flat else 0.0
        if (flat or not at_means[0] <= self._no_model) and self._take_unit(start):
            at_means = self.evaluate(self.means)
        x, value, converged = self._newton(at_means, exact=exact)
        if abs(x[0] - self.means[0]) > FAR / np.sqrt(self.precision[0]) and self._take_unit(0.0):
            x, value, converged = self._newton(self.evaluate(self.means), exact=exact)
        return Solution(x, value, converged, self.passes, None, time.perf_counter() - began)

    def _newton(self, found: Evaluation, *, exact: bool) -> tuple[np.ndarray, float, bool]:
        """Steps from the prior's means, where the function was `found`, halved where they lead uphill."""
        x, (value, gradient, hessian) = self.means, found
        for _ in range(STEPS):
            scale = np.sqrt(np.diag(hessian))  # numbers for huge scores are tiny
            direction = np.linalg.solve(hessian / np.outer(scale, scale), gradient / scale) / scale
            decrease, length = float(gradient @ direction), 1.0
            if decrease <= (LAST_EXACT_STEP * max(abs(value), 1.0) if exact else LAST_STEP):
                return x - direction, value - 0.5 * decrease, True
            found = self.evaluate(x - direction)
            allowed = value + ROUNDING * self.total
            while not found[0] <= allowed - 1e-4 * length * decrease and length > SHORTEST:
                length /= 2
                found = self.evaluate(x - length * direction)
            x, (value, gradient, hessian) = x - length * direction, found
        return x, value, False

    def _take_unit(self, start: float) -> bool:
        """Take the priors of the scores in the unit in which they are logits; False if it is about the present one.

        Args:
            start: logarithm of the unit from which on it is searched.
        """

        def loss(log_unit: float) -> float:
            x = self.means.copy()
            x[: self.count] *= np.exp(log_unit)
            pull = x - self.means
            return self.evaluate(x)[0] - 0.5 * float((self.precision * pull) @ pull)

        place, least = start, loss(start)
        for step in (UNIT_STEP, -UNIT_STEP):
            while (found := loss(place + step)) < least - 0.5:
                place, least = place + step, found
        if place == 0:
            return False
        around = (place - UNIT_STEP, place + UNIT_STEP)
        place = float(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 0.1}).x)
        if abs(place) < SAME_UNIT:
            return False
        self.means[: self.count] *= np.exp(place)
        self.precision[: self.count] *= np.exp(-2 * place)
        return True

    @property
    def _no_model(self) -> float:
        """A value that is reached without any score, whatever the samples are."""
        constant, pull = self.means[self.count :] @ self.vectors.numpy(), self.means[: self.count]
        of_scores = 0.5 * self.precision[: self.count] @ np.square(pull)
        return float(self.total * (np.log(len(constant)) + np.ptp(constant)) + of_scores)

    def evaluate(self, x: np.ndarray) -> Evaluation:
        """Value, gradient (J,) and Hessian (J, J) of the negative log posterior; one pass over the samples."""
        size, count = len(x), self.count
        totals = torch.zeros(2 + size + size * size, dtype=torch.float64)  # one exchange between processes
        value, total, gradient = totals[:1], totals[1:2], totals[2 : 2 + size]
        hessian = totals[2 + size :].view(size, size)
        constants = torch.from_numpy(x[count:]) @ self.vectors
        for part in self.held():
            scores, weights = part.scores, part.weights.to(part.scores.dtype)
            vectors, constant = self.vectors.to(scores), constants.to(scores)
            flat = scores.view(count, -1)
            logits = (torch.from_numpy(x[:count]).to(scores) @ flat).view(scores.shape[1:]).add_(constant.unsqueeze(1))
            highest = logits.amax(0)
            shares = logits.sub_(highest).exp_()
            sums = shares.sum(0)
            losses = highest + sums.log() - constant[part.labels]
            value += part.weights @ losses.double()
            total += part.weights.sum()
            shares *= weights / sums
            products = shares * scores
            expected = torch.cat([products.sum(1), vectors @ shares])  # (J, B), times the weights
            gradient += expected.sum(1, dtype=torch.float64)
            gradient[count:] -= self.vectors[:, part.labels] @ part.weights
            hessian -= (expected / weights) @ expected.T
            hessian[:count, :count] += products.view(count, -1) @ flat.T
            cross = products.sum(2) @ vectors.T
            hessian[:count, count:] += cross
            hessian[count:, :count] += cross.T
            hessian[count:, count:] += (vectors * shares.sum(1)) @ vectors.T
        self.world.sum(totals)
        self.total = float(total)
        self.passes += 1
        self.curvature = float(hessian[0, 0]) / self.total
        pull = x - self.means
        return (
            float(value) + 0.5 * float((self.precision * pull) @ pull),
            gradient.numpy() + self.precision * pull,
            hessian.numpy() + np.diag(self.precision),
        )
