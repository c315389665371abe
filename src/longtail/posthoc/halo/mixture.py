"""HALO's mixture: scores of the model and of the heads, mixed by likelihood on unseen samples.

    logits = A eta + l1 (LDA - eta) + l2 (Q - eta) + c log pi + v z(log |W_j|)

with z standardised over the classes. Each coefficient has a Gaussian prior, so the problem is strictly
convex: Newton's method needs a handful of passes over the scores, whatever their number. The prior of c is one of
c + A - l1 - l2: eta contains log pi, so the correction of the training prior moves with the factor of eta.
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

from longtail.distributed import SINGLE_PROCESS, World
from longtail.posthoc.halo.unseen import ScoredSamples
from longtail.posthoc.solver import Solution

STEPS = 50
SHORTEST_STEP = 1e-9
# Expected decrease (nats) below which a Newton step is taken without another evaluation. What is left after a step of
# 0.02 nats is about a thousandth of a standard error of the coefficients.
LAST_STEP, LAST_EXACT_STEP = 0.02, 1e-8
ROUNDING = 1e-6  # of the value, relative to the number of samples: float32 scores resolve no smaller decrease
SMALLEST_SCORE, LARGEST_SCORE = 1e-12, 1e12  # scores whose products float32 can represent
# Where classes are missing, the coefficients of the class vectors are extrapolated to them. Many images of a few
# classes seem to determine these well, but every class deviates from them: so the prior counts for more.
EXTRAPOLATED = 0.1  # times the deviations of the priors of the class vectors
FAR = 3.0  # deviations from the prior's mean
FLAT = 0.05  # curvature of the model's coefficient for scores that hardly separate classes
LN_2 = float(np.log(2))
SMALLEST_EXPONENT = -100.0  # powers of two below this count as 0; much smaller ones are slow to compute with
UNIT_STEP = float(np.log(4))
SAME_UNIT = float(np.log(3))

Evaluation = tuple[float, np.ndarray, np.ndarray]  # value, gradient (J,), Hessian (J, J)


@dataclass(frozen=True)
class Prior:
    """Gaussian prior of a coefficient: mean and standard deviation."""

    mean: float
    deviation: float


# Frozen on digits, one ResNet-32 and one small network for CIFAR-100-LT.
PRIORS: dict[str, Prior] = {
    "model": Prior(1 / 1.4, 0.25),
    "lda": Prior(0.1, 0.2),
    "balanced": Prior(0.1, 0.2),
    "prior": Prior(0.3, 0.2),
    "norms": Prior(0.0, 0.2),
}


class Mixture:
    """The problem: J coefficients, of scores per sample and class, then of vectors per class.

    Args:
        names: of the coefficients, scores first.
        batches: one pass over this process's share of the samples.
        vectors: (V, K) float64.
        world: processes that share the samples.
        extrapolated: whether classes are missing, to which the coefficients of the vectors are extrapolated.
        subsampling: factor by which samples are subsampled for a first solve, the start of the second; 1 for none.
    """

    def __init__(
        self,
        names: Sequence[str],
        batches: Callable[[], Iterable[ScoredSamples]],
        vectors: Tensor,
        world: World = SINGLE_PROCESS,
        *,
        extrapolated: bool = False,
        subsampling: int = 1,
    ) -> None:
        self.names = names
        self.batches = batches
        self.vectors = vectors
        self.world = world
        self.extrapolated = extrapolated
        self.subsampling = subsampling
        self.count = len(names) - len(vectors)
        self.total = 0.0  # weight of all samples, from the last pass
        self.curvature = 0.0  # of the model's coefficient per sample, from the last pass
        self.passes = 0
        self.means = np.array([PRIORS[name].mean for name in names])
        deviations = np.array([PRIORS[name].deviation for name in names])
        deviations[self.count :] *= EXTRAPOLATED if extrapolated else 1.0
        self.precision = deviations**-2
        self.coupling = np.eye(len(names))  # (J, J), times the coefficients: what has the independent priors
        if "prior" in names:
            self.coupling[names.index("prior"), : self.count] = [1.0, *[-1.0] * (self.count - 1)]

    def solve(self, *, exact: bool = False) -> Solution:
        """Newton's method, from the means of the priors.

        The priors hold for logits, logarithms of probabilities. Scores on another scale (cosines without a scale,
        logits times a thousand) are detected by a start that is worse than no model or hardly differs from it, or by a
        fit far from its prior: then the priors are converted to the unit in which the scores are logits.

        Args:
            exact: to the last digits, not to a fraction of the coefficients' standard errors.
        """
        began = time.perf_counter()
        self.passes = 0
        x, value, converged = self._newton(*self._start(), exact=exact)
        if abs(x[0] - self.means[0]) > FAR / np.sqrt(self.precision[0]) and self._convert_priors(0.0):
            x, value, converged = self._newton(self._centre, self.evaluate(self._centre), exact=exact)
        return Solution(x, value, converged, self.passes, None, time.perf_counter() - began)

    def _start(self) -> tuple[np.ndarray, Evaluation]:
        """The first point and the function there: the solution on a subsample, or the means of the priors."""
        if self.subsampling > 1:
            subsample = self._subsample()
            start = subsample.solve().x
            # In the unit of the scores.
            self.means, self.precision, self.coupling = subsample.means, subsample.precision, subsample.coupling
            if np.isfinite((evaluated := self.evaluate(start))[0]):
                return start, evaluated
        at_means = self.evaluate(self._centre)
        flat = 0 < self.curvature < FLAT and at_means[0] > 0.5 * self._no_model
        unit = -0.5 * float(np.log(self.curvature)) if flat else 0.0
        if (flat or not at_means[0] <= self._no_model) and self._convert_priors(unit):
            at_means = self.evaluate(self._centre)
        return self._centre, at_means

    @property
    def _centre(self) -> np.ndarray:
        """(J,) the coefficients at the means of the priors."""
        return np.linalg.solve(self.coupling, self.means)

    def _subsample(self) -> Mixture:
        """The problem on one sample of each group of `subsampling` neighbours, weighted by the size of the group.

        The sample is drawn at random, so neither samples sorted by class nor classes that take turns bias it.
        """
        rng, drawn = np.random.default_rng(0), []
        for batch in self.batches():
            first = np.arange(0, len(batch.labels), self.subsampling)
            rows = first + rng.integers(self.subsampling, size=len(first))
            drawn.append(batch.subset(torch.from_numpy(rows[rows < len(batch.labels)])))
        labels, weights = (torch.cat([getattr(one, name) for one in drawn]) for name in ("labels", "weights"))
        scores = torch.cat([one.scores for one in drawn], dim=2)
        blocks = list(ScoredSamples(labels, self.subsampling * weights, scores).blocks())
        return Mixture(self.names, lambda: blocks, self.vectors, self.world, extrapolated=self.extrapolated)

    def _newton(self, start: np.ndarray, at_start: Evaluation, *, exact: bool) -> tuple[np.ndarray, float, bool]:
        """Newton steps, halved until the value falls."""
        x, (value, gradient, hessian) = start, at_start
        for _ in range(STEPS):
            scale = np.sqrt(np.diag(hessian))  # coefficients of huge scores are tiny
            direction = np.linalg.solve(hessian / np.outer(scale, scale), gradient / scale) / scale
            decrease, length = float(gradient @ direction), 1.0
            if decrease <= (LAST_EXACT_STEP * max(abs(value), 1.0) if exact else LAST_STEP):
                return x - direction, value - 0.5 * decrease, True
            evaluated = self.evaluate(x - direction)
            allowed = value + ROUNDING * self.total
            while not evaluated[0] <= allowed - 1e-4 * length * decrease and length > SHORTEST_STEP:
                length /= 2
                evaluated = self.evaluate(x - length * direction)
            x, (value, gradient, hessian) = x - length * direction, evaluated
        return x, value, False

    def _convert_priors(self, start: float) -> bool:
        """Convert the priors to the unit in which the scores are logits; False if it is about the present one.

        Args:
            start: logarithm of the unit at which the search starts.
        """

        def loss(log_unit: float) -> float:
            x = self._centre
            x[: self.count] *= np.exp(log_unit)
            return self.evaluate(x)[0] - self._prior(x)[0]

        unit, least = start, loss(start)
        for step in (UNIT_STEP, -UNIT_STEP):
            while (value := loss(unit + step)) < least - 0.5:
                unit, least = unit + step, value
        if unit == 0:
            return False
        bounds = (unit - UNIT_STEP, unit + UNIT_STEP)
        unit = float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 0.1}).x)
        if abs(unit) < SAME_UNIT:
            return False
        self.means[: self.count] *= np.exp(unit)
        self.precision[: self.count] *= np.exp(-2 * unit)
        self.coupling[self.count :, : self.count] *= np.exp(-unit)
        return True

    def _prior(self, x: np.ndarray) -> Evaluation:
        """Value, gradient and Hessian of the negative log prior."""
        pull = self.coupling @ x - self.means
        weighted = self.precision[:, None] * self.coupling
        return 0.5 * float((self.precision * pull) @ pull), weighted.T @ pull, self.coupling.T @ weighted

    @property
    def _no_model(self) -> float:
        """An upper bound of the value with all coefficients of the scores at 0."""
        x = np.append(np.zeros(self.count), self._centre[self.count :])
        constant = x[self.count :] @ self.vectors.numpy()
        return float(self.total * (np.log(len(constant)) + np.ptp(constant)) + self._prior(x)[0])

    def evaluate(self, x: np.ndarray) -> Evaluation:
        """Value, gradient (J,) and Hessian (J, J) of the negative log posterior; one pass over the samples."""
        size, count = len(x), self.count
        totals = torch.zeros(2 + size + size * size, dtype=torch.float64)  # one exchange between processes
        value, total, gradient = totals[:1], totals[1:2], totals[2 : 2 + size]
        hessian = totals[2 + size :].view(size, size)
        constants = torch.from_numpy(x[count:]) @ self.vectors
        # Powers of two: as exact as those of e, and faster.
        factors, offsets = torch.from_numpy(x[:count]) / LN_2, constants.unsqueeze(1) / LN_2
        for batch in self.batches():
            scores, weights = batch.scores, batch.weights.to(batch.scores.dtype)
            vectors = self.vectors.to(scores)
            flat = scores.view(count, -1)
            logits = (factors.to(scores) @ flat).view(scores.shape[1:]).add_(offsets.to(scores))
            highest = logits.amax(0)
            probabilities = logits.sub_(highest).clamp_min_(SMALLEST_EXPONENT).exp2_()
            sums = probabilities.sum(0)
            losses = LN_2 * highest + sums.log() - constants[batch.labels].to(scores)
            value += batch.weights @ losses.double()
            total += batch.weights.sum()
            probabilities *= weights / sums
            products = probabilities * scores
            expected = torch.cat([products.sum(1), vectors @ probabilities])  # (J, B), times the weights
            gradient += expected.sum(1, dtype=torch.float64)
            gradient[count:] -= self.vectors[:, batch.labels] @ batch.weights
            hessian -= (expected / weights) @ expected.T
            hessian[:count, :count] += products.view(count, -1) @ flat.T
            cross = products.sum(2) @ vectors.T
            hessian[:count, count:] += cross
            hessian[count:, :count] += cross.T
            hessian[count:, count:] += (vectors * probabilities.sum(1)) @ vectors.T
        self.world.sum(totals)
        self.total = float(total)
        self.passes += 1
        self.curvature = float(hessian[0, 0]) / self.total
        of_prior = self._prior(x)
        return float(value) + of_prior[0], gradient.numpy() + of_prior[1], hessian.numpy() + of_prior[2]
