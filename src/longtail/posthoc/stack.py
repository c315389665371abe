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

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.posthoc.held import Held
from longtail.posthoc.solver import Solution

STEPS = 50
SHORTEST = 1e-9
# Expected decrease from which on the function is the parabola that a step assumes: no pass looks again. What is left
# after a step of 0.02 nats is about a thousandth of a standard error of the numbers.
LAST_STEP, LAST_EXACT_STEP = 0.02, 1e-8
ROUNDING = 1e-6  # of a value, relative to the samples' number: float32 scores tell no smaller decrease
SMALLEST, LARGEST = 1e-12, 1e12  # scores whose products float32 numbers still hold
# Many images of few classes look as if they told the slope of the biases well, but each class has a bias of its own:
# where other classes are missing, what is usual for networks says more of them than that slope.
EXTRAPOLATED = 0.1  # times the deviations of the numbers of class vectors
FAR = 3.0  # deviations from the prior's mean
FLAT = 0.05  # curvature of the model's own factor for scores that hardly tell classes apart
LN_2 = float(np.log(2))
NEARLY_NONE = -100.0  # power of two below which a share counts as nothing; much smaller ones are slow to compute with
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


class Stack:
    """The problem: numbers called `names` that mix scores per sample and class, then vectors per class.

    Args:
        names: of the numbers, scores first.
        held: goes through this process's share of the samples once.
        vectors: (V, K) float64.
        world: processes that share the samples.
        extrapolated: whether classes are missing, for which the numbers of the vectors are extrapolated.
        every: of so many samples one is taken for a first solve, whose end is where the whole one starts; 1: none.
    """

    def __init__(
        self,
        names: Sequence[str],
        held: Callable[[], Iterable[Held]],
        vectors: Tensor,
        world: World = SINGLE_PROCESS,
        *,
        extrapolated: bool = False,
        every: int = 1,
    ) -> None:
        self.names = names
        self.held = held
        self.vectors = vectors
        self.world = world
        self.extrapolated = extrapolated
        self.every = every
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
        x, value, converged = self._newton(*self._start(), exact=exact)
        if abs(x[0] - self.means[0]) > FAR / np.sqrt(self.precision[0]) and self._take_unit(0.0):
            x, value, converged = self._newton(self.means, self.evaluate(self.means), exact=exact)
        return Solution(x, value, converged, self.passes, None, time.perf_counter() - began)

    def _start(self) -> tuple[np.ndarray, Evaluation]:
        """Where the steps start, and the function there: the end of a solve on some samples, or the prior's means."""
        if self.every > 1:
            some = self._some_samples()
            start = some.solve().x
            self.means, self.precision = some.means, some.precision  # in the unit of the scores
            if np.isfinite((found := self.evaluate(start))[0]):
                return start, found
        at_means = self.evaluate(self.means)
        flat = 0 < self.curvature < FLAT and at_means[0] > 0.5 * self._no_model
        unit = -0.5 * float(np.log(self.curvature)) if flat else 0.0
        if (flat or not at_means[0] <= self._no_model) and self._take_unit(unit):
            at_means = self.evaluate(self.means)
        return self.means, at_means

    def _some_samples(self) -> Stack:
        """The problem of one in `every` samples; each stands for as many.

        Of neighbours one is drawn: samples sorted by class give every class its part, labels that come in turns, too.
        """
        rng, taken = np.random.default_rng(0), []
        for part in self.held():
            first = np.arange(0, len(part.labels), self.every)
            drawn = first + rng.integers(self.every, size=len(first))
            taken.append(part.taken(torch.from_numpy(drawn[drawn < len(part.labels)])))
        labels, weights = (torch.cat([getattr(one, name) for one in taken]) for name in ("labels", "weights"))
        scores = torch.cat([one.scores for one in taken], dim=2)
        some = list(Held(labels, self.every * weights, scores).blocks())
        return Stack(self.names, lambda: some, self.vectors, self.world, extrapolated=self.extrapolated)

    def _newton(self, start: np.ndarray, found: Evaluation, *, exact: bool) -> tuple[np.ndarray, float, bool]:
        """Steps from a start, where the function was `found`, halved where they lead uphill."""
        x, (value, gradient, hessian) = start, found
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
        # Powers of two: as exact as those of e, and faster.
        factors, offsets = torch.from_numpy(x[:count]) / LN_2, constants.unsqueeze(1) / LN_2
        for part in self.held():
            scores, weights = part.scores, part.weights.to(part.scores.dtype)
            vectors = self.vectors.to(scores)
            flat = scores.view(count, -1)
            logits = (factors.to(scores) @ flat).view(scores.shape[1:]).add_(offsets.to(scores))
            highest = logits.amax(0)
            shares = logits.sub_(highest).clamp_min_(NEARLY_NONE).exp2_()
            sums = shares.sum(0)
            losses = LN_2 * highest + sums.log() - constants[part.labels].to(scores)
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
