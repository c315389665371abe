"""Scores of samples that the heads had not seen: the one number fitted on them, and the estimates of a fit.

    logits = A (eta - log pi) + log q

eta are scores of a head fitted at the training prior pi, q is the target prior. A, how far the evidence is to be
believed, is fitted by likelihood at the prior pi^(1/2), half-way between head and tail. Ridge heads are
under-confident, so A is above 1 as a rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.posthoc.deployment import SetScores
from longtail.posthoc.prior_estimate import PriorCheck, check_prior

SCALES = (0.02, 50.0)
USUAL_SCALE, SPREAD = 1.5, 0.5  # log A ~ N(log 1.5, 0.5^2): samples that are all classified correctly ask for any A
BINS = 15
ADDED_SAMPLES = 2  # to every class, of the average accuracy: no interval has width zero


@dataclass(frozen=True)
class Evidence:
    """Scores of unseen samples without the training prior.

    Args:
        scores: (M, K) eta - log pi.
        labels: (M,) int64.
        counts: (K,) training samples.
        copies: (M,) the same number for copies of a sample, or None if there are none.
    """

    scores: Tensor
    labels: Tensor
    counts: np.ndarray
    copies: np.ndarray | None = None

    @property
    def log_prior(self) -> Tensor:
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(self.counts / self.counts.sum())).to(self.scores)

    def weights(self, power: float = 0.5) -> Tensor:
        """(M,) weights proportional to n^(-power), summing to 1: unseen samples as if drawn from pi^(1 - power)."""
        weights = torch.from_numpy(self.counts.astype(np.float64))[self.labels].pow(-power)
        return weights / weights.sum()

    @property
    def one_sample(self) -> float:
        """The weight of a sample among the effective number of samples."""
        return float(self.weights().square().sum())

    def several(self) -> Evidence:
        """Without the classes of one sample, none of which can be unseen."""
        kept = torch.from_numpy(self.counts > 1)
        if bool(kept.all()):
            return self
        number = torch.cumsum(kept, 0) - 1
        return Evidence(self.scores[:, kept], number[self.labels], self.counts[self.counts > 1])

    def best_scale(self, world: World = SINGLE_PROCESS) -> tuple[float, float]:
        """A, and the weighted loss that it gives; the same in all processes."""
        evidence = self.several()
        weights, shift = evidence.weights(), 0.5 * evidence.log_prior

        def loss(log_scale: float) -> float:
            moved = torch.add(shift, evidence.scores, alpha=math.exp(log_scale))
            picked = moved.gather(1, evidence.labels.unsqueeze(1)).squeeze(1)
            unusual = ((log_scale - math.log(USUAL_SCALE)) / SPREAD) ** 2 / 2
            return float(weights @ (torch.logsumexp(moved, 1) - picked).double()) + evidence.one_sample * unusual

        bounds = tuple(math.log(scale) for scale in SCALES)
        found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-3})
        values = torch.tensor([math.exp(found.x), float(found.fun)], dtype=torch.float64)
        world.broadcast([values])  # rounding must not let processes decide differently
        return float(values[0]), float(values[1])


@dataclass(frozen=True)
class Estimate:
    """Scores of held-out samples, as shares between 0 and 1; classes of one sample are not among them.

    Args:
        accuracy: mean accuracy of the samples (at the training prior) or of the classes (at equal classes).
        low: of its 95 % interval.
        high: of its 95 % interval.
        nll: mean negative log-likelihood, in nats.
        ece: expected calibration error, 15 bins.
    """

    accuracy: float
    low: float
    high: float
    nll: float
    ece: float

    def __str__(self) -> str:
        return f"{self.accuracy:.2f} [{self.low:.2f}, {self.high:.2f}], NLL {self.nll:.2f}, ECE {self.ece:.2f}"


@dataclass(frozen=True)
class ProbeResult:
    """How a fit ended.

    Args:
        ridge: chosen ridge of the head on all samples, of a class of average size.
        power: chosen power of class sizes in the ridge: 1/2, or 0 for one ridge.
        shrinkage: chosen shrinkage of the metric.
        scaled: whether the metric shrinks towards the features' variances.
        scale: A, the factor of the evidence.
        folds: number of folds.
        held_out: samples that were held out, each scored by a head that had not seen it.
        passes: reads of the features by all solves.
        converged: whether the head on all samples was solved to the tolerance.
        seconds: of the whole fit.
        natural: estimated scores where classes are as frequent as in training (target prior "train").
        balanced: estimated scores where classes are equally frequent (target prior "uniform").
        prior_check: the estimate of class frequencies, tried on the samples that were held out.
        set_scores: of the samples that were held out, for prediction sets; classes are those that have samples.
        copies: samples whose features and label are those of another one; a fold holds out all or none of them.
        far: samples more than ten times as far from the middle as the median one, moved to that distance for the fit.
    """

    ridge: float
    power: float
    shrinkage: float
    scaled: bool
    scale: float
    folds: int
    held_out: int
    passes: int
    converged: bool
    seconds: float
    natural: Estimate | None
    balanced: Estimate | None
    prior_check: PriorCheck | None = None
    set_scores: SetScores | None = None
    copies: int = 0
    far: int = 0

    def notes(self) -> list[str]:
        """What is unusual about the samples."""
        notes = []
        if self.copies:
            notes.append(f"copies of other samples: {self.copies:,}; they are held out together")
        if self.far:
            far = "samples more than ten times as far from the middle as the median one"
            notes.append(f"{far}: {self.far:,}; the fit moves them to that distance")
        return notes


def estimate(evidence: Evidence, scale: float, *, balanced: bool, inflation: float = 1.0) -> Estimate:
    """Scores of unseen samples after calibration, at equal classes or at the training prior.

    The variance of the accuracy is that of independent samples times `inflation`.
    """
    logits = scale * evidence.scores
    if not balanced:
        logits = logits + evidence.log_prior
    labels = evidence.labels.numpy()
    log_shares = logits.log_softmax(1)
    nll = -log_shares.gather(1, evidence.labels.unsqueeze(1)).squeeze(1).double().numpy()
    confidence, best = log_shares.max(1)
    correct = best.numpy() == labels
    counts = np.bincount(labels, minlength=len(evidence.counts))
    copies = np.arange(len(labels)) if evidence.copies is None else evidence.copies
    _, first, sizes = np.unique(copies, return_index=True, return_counts=True)
    distinct = np.bincount(labels[first], minlength=len(counts))
    weights = 1 / counts[labels] if balanced else np.ones(len(labels))
    weights = weights / weights.sum()
    error = _calibration_error(confidence.double().exp().numpy(), correct, weights)
    accuracy = float(weights @ correct)
    if balanced:
        low, high = _interval(correct, labels, counts, distinct, inflation)
    else:
        low, high = _wilson(accuracy, len(correct) ** 2 / (sizes**2).sum() / inflation)
    return Estimate(accuracy, low, high, float(weights @ nll), error)


def _calibration_error(confidence: np.ndarray, correct: np.ndarray, weights: np.ndarray) -> float:
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return float(np.abs(np.bincount(bins, weights * (confidence - correct), BINS)).sum())


def _wilson(share: float, number: float) -> tuple[float, float]:
    """Wilson's interval of a share of so many samples."""
    z = norm.ppf(0.975)
    centre = (number * share + z**2 / 2) / (number + z**2)
    half = z / (number + z**2) * np.sqrt(number * share * (1 - share) + z**2 / 4)
    return max(float(centre - half), 0.0), min(float(centre + half), 1.0)


def _interval(
    correct: np.ndarray, labels: np.ndarray, counts: np.ndarray, distinct: np.ndarray, inflation: float
) -> tuple[float, float]:
    """Interval of the mean accuracy of classes: the sum of their binomial variances, copies counted once (K,)."""
    present = counts > 0
    hits, sizes, number = np.bincount(labels, correct, len(counts))[present], counts[present], distinct[present]
    share = (hits / sizes * number + ADDED_SAMPLES * correct.mean()) / (number + ADDED_SAMPLES)
    average = (correct.mean() * number.sum() + 1) / (number.sum() + 2)
    variance = np.maximum(share * (1 - share), average * (1 - average) / (number + 1)) / number
    half = norm.ppf(0.975) * np.sqrt(inflation * variance.sum()) / len(sizes)
    value = (hits / sizes).mean()
    return max(float(value - half), 0.0), min(float(value + half), 1.0)


def scores_of(evidence: Evidence, scale: float, scored: int, folds: int) -> tuple[Estimate, Estimate]:
    """Estimates at the training prior and at equal classes, from so many scored folds.

    Heads of different folds share most of their samples, so the variance of independent samples is too small. Nadeau
    and Bengio (Inference for the generalization error, 2003) add the ratio of held-out to fitted samples.
    """
    inflation = 1 + scored / (folds - 1)
    natural, balanced = (estimate(evidence, scale, balanced=equal, inflation=inflation) for equal in (False, True))
    return natural, balanced


def tried_on(evidence: Evidence, scale: float) -> tuple[PriorCheck | None, SetScores | None]:
    """What a deployment needs of unseen samples: a trial of the estimate of class frequencies, scores for sets."""
    probabilities, labels = (scale * evidence.scores).softmax(1).numpy(), evidence.labels.numpy()
    log_prior = evidence.log_prior.double().numpy()
    return check_prior(probabilities, labels, np.zeros_like(log_prior), log_prior), SetScores.of(probabilities, labels)
