"""What a fit of Probe leaves behind, with scores estimated on samples that the heads had not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from longtail.posthoc.conformal import SetScores
from longtail.posthoc.prior_estimate import PriorCheck, check_prior
from longtail.posthoc.probe.scale import Evidence

BINS = 15
ADDED_SAMPLES = 2  # to every class, of the average accuracy: no interval has width zero


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
    weights = 1 / counts[labels] if balanced else np.ones(len(labels))
    weights = weights / weights.sum()
    error = _calibration_error(confidence.double().exp().numpy(), correct, weights)
    accuracy = float(weights @ correct)
    if balanced:
        low, high = _interval(correct, labels, counts, inflation)
    else:
        low, high = _wilson(accuracy, len(correct) / inflation)
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


def _interval(correct: np.ndarray, labels: np.ndarray, counts: np.ndarray, inflation: float) -> tuple[float, float]:
    """Interval of the mean accuracy of classes: the sum of their binomial variances."""
    present = counts > 0
    hits, sizes = np.bincount(labels, correct, len(counts))[present], counts[present]
    share = (hits + ADDED_SAMPLES * correct.mean()) / (sizes + ADDED_SAMPLES)
    average = (correct.sum() + 1) / (len(correct) + 2)
    variance = np.maximum(share * (1 - share), average * (1 - average) / (sizes + 1)) / sizes
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
    probabilities, labels = (scale * evidence.scores).double().softmax(1).numpy(), evidence.labels.numpy()
    log_prior = evidence.log_prior.double().numpy()
    return check_prior(probabilities, labels, np.zeros_like(log_prior), log_prior), SetScores.of(probabilities, labels)
