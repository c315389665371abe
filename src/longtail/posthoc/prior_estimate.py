"""The class frequencies of a deployment, estimated from unlabelled samples.

Free estimates of K frequencies do harm with many classes. One number works: the target prior is a power pi^p of the
training prior (p = 1 as in training, 0 balanced, below 0 reversed). Posteriors at one prior q0 give the likelihood of
unlabelled samples at any other, and p maximises

    sum_i log sum_k post_k(x_i) q_p(k) / q0(k) - p^2 / 2,        q_p = pi^p / sum(pi^p),  p ~ N(0, 1)

It needs posteriors that are right along log pi, so it is tried first where p is known: on held-out samples that are
weighted to the training prior (p = 1) and to balance (p = 0). A bias is corrected, a large one is refused. Frequencies
that look like no power are reported if they are further from one than those of held-out samples, weighted to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail.errors import UserError, whole_number
from longtail.files.tensors import as_array
from longtail.posthoc.prior_powers import Peak, PowerFamily, is_spread_out
from longtail.posthoc.priors import to_effective_number

FEWEST_SAMPLES = 30
NORMAL = 1.96
USUAL_BIAS = 0.3  # standard deviation of the bias of p over networks
MOST_BIAS = 0.7
LARGEST_ROUNDING = 0.01  # of the sum of a row, as float16 may have
SLOPES = (0.5, 2.0)  # smallest and largest change of the estimate where p changes by 1
# Samples that fit no power: a p-value, and a squared distance between frequencies, beyond that of held-out samples.
SIGNIFICANT, MISFIT = 0.01, 0.05
TRIED_MISFITS = (-1.0, 0.0, 1.0)  # powers


@dataclass(frozen=True)
class PriorCheck:
    """How well p is estimated where it is known: on held-out samples, each scored by a fit that has not seen it.

    Args:
        samples: number of held-out samples.
        natural_bias: estimate minus known p with the samples weighted to the training prior (p = 1).
        natural_error: its standard error.
        balanced_bias: the same with samples weighted to balance (p = 0).
        balanced_error: its standard error.
        misfits: squared distances of frequencies from the powers -1, 0 and 1 to which the samples are weighted.
        misfit_errors: their standard errors.
    """

    samples: int
    natural_bias: float
    natural_error: float
    balanced_bias: float
    balanced_error: float
    misfits: tuple[float, float, float] = (0.0, 0.0, 0.0)
    misfit_errors: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def usual_misfit(self, power: float) -> float:
        """The largest distance from a power that samples distributed like it may have with this classifier."""
        largest = np.maximum(self.misfits, 0) + NORMAL * np.array(self.misfit_errors)
        return float(np.interp(power, TRIED_MISFITS, largest))

    @property
    def slope(self) -> float:
        """Change of the estimate where p changes by 1."""
        return 1 + _shrunk(self.natural_bias, self.natural_error) - _shrunk(self.balanced_bias, self.balanced_error)

    @property
    def refusal(self) -> str | None:
        """Why p is not to be estimated with this classifier, or None."""
        biases = (self.natural_bias, self.natural_error), (self.balanced_bias, self.balanced_error)
        if max(abs(_shrunk(*one)) for one in biases) <= MOST_BIAS and SLOPES[0] <= self.slope <= SLOPES[1]:
            return None
        return (
            f"this classifier's probabilities do not give the class frequencies: on {self.samples:,} held-out samples "
            f"the estimated power is {1 + self.natural_bias:.2f} where it is 1, and {self.balanced_bias:.2f} where it "
            "is 0; give the target prior (weights per class), or keep it uniform"
        )

    def corrected(self, peak: Peak) -> tuple[float, float, float]:
        """An estimate and its 95 % interval without the bias; the interval includes what is not known of the bias."""
        offset, slope = _shrunk(self.balanced_bias, self.balanced_error), self.slope
        right = (peak.power - offset) / slope
        parts = abs(1 - right) * _left(self.balanced_error), abs(right) * _left(self.natural_error)
        doubt = NORMAL * sum(parts) / slope
        below, above = (np.hypot(end / slope, doubt) for end in (peak.power - peak.low, peak.high - peak.power))
        return right, right - below, right + above


def _shrunk(bias: float, error: float) -> float:
    """The expected bias, given an estimate of it."""
    return bias * USUAL_BIAS**2 / (USUAL_BIAS**2 + error**2)


def _left(error: float) -> float:
    """The standard deviation of what is left of the bias."""
    return float(error * USUAL_BIAS / np.hypot(USUAL_BIAS, error))


@dataclass(frozen=True)
class PriorEstimate:
    """The target prior of unlabelled samples: `with_target_prior(estimate.power)` applies it.

    Args:
        power: p of the target prior pi^p.
        low: of its 95 % interval.
        high: of its 95 % interval.
        samples: number of unlabelled samples.
        prior: (K,) the class frequencies.
        fits: False if the samples do not look like any power of the training prior.
        surplus: (K,) observed frequencies minus those of the power that fits best.
    """

    power: float
    low: float
    high: float
    samples: int
    prior: np.ndarray
    fits: bool
    surplus: np.ndarray


@dataclass(frozen=True)
class PriorEstimator:
    """Estimates the target prior from probabilities of a classifier.

    Args:
        log_prior: (K,) logarithm of the training prior; -inf for a class that is never predicted.
        log_target: (K,) logarithm of the prior that the probabilities are right for, up to a constant.
        check: of the classifier on held-out samples; None: it was not checked.
    """

    log_prior: np.ndarray
    log_target: np.ndarray
    check: PriorCheck | None

    def estimate(self, probabilities: np.ndarray) -> PriorEstimate:
        """The target prior of samples with probabilities (N, K)."""
        self.require_usable()
        probabilities = self.as_probabilities(probabilities)
        if len(probabilities) < FEWEST_SAMPLES:
            raise UserError(
                f"the class frequencies are estimated from {FEWEST_SAMPLES} samples at least, not from "
                f"{len(probabilities)}; give the target prior instead"
            )
        assert self.check is not None
        family = PowerFamily.of(self.log_prior, self.log_target)
        posteriors = probabilities.astype(np.float64)[:, family.classes]
        predicted = (posteriors * np.exp(-family.log_target)).argmax(1)
        if (predicted == predicted[0]).all():
            raise UserError(
                f"all {len(predicted):,} samples are predicted as one class, which tells nothing of the frequencies "
                "of the others; give samples of several classes, or the target prior"
            )
        peak = Peak.of(family.curve(posteriors))
        if not peak.is_inside:
            raise UserError(
                "the samples are further from balance than any power of the training prior that can be estimated "
                f"(beyond {peak.power:+.0f}); give the target prior (weights per class)"
            )
        power, low, high = self.check.corrected(peak)
        misfit = family.misfit(posteriors, peak.power)
        prior, off = np.zeros(len(self.log_prior)), np.zeros(len(self.log_prior))
        prior[family.classes], off[family.classes] = np.exp(family.at(power)), misfit.surplus
        fits = misfit.p_value >= SIGNIFICANT or misfit.distance <= MISFIT + self.check.usual_misfit(peak.power)
        return PriorEstimate(float(power), float(low), float(high), len(posteriors), prior, bool(fits), off)

    def require_usable(self) -> None:
        """Refuse a classifier with which class frequencies are not to be estimated."""
        if not np.isfinite(self.log_target[np.isfinite(self.log_prior)]).all():
            raise UserError(
                "probabilities at a target prior with 0 for a class do not tell its frequency; estimate with the "
                'target prior "uniform"'
            )
        PowerFamily.of(self.log_prior, self.log_target)
        if self.check is None:
            raise UserError(
                "class frequencies are estimated only after a trial on held-out samples, and this classifier was "
                f"fitted without {FEWEST_SAMPLES} of them; fit it with held-out samples, or give the target prior"
            )
        if self.check.refusal is not None:
            raise UserError(self.check.refusal)

    def as_probabilities(self, rows: Any) -> np.ndarray:
        """Rows (B, K) in float32, or an error if they are no probabilities of these classes."""
        found = as_array(rows)
        if found.dtype.kind not in "fiu" or found.ndim != 2 or found.shape[1] != len(self.log_prior):
            raise UserError(f"give probabilities of {len(self.log_prior)} classes, shape (B, K)")
        if not (found >= 0).all() or (np.abs(found.sum(1) - 1) > LARGEST_ROUNDING).any():
            raise UserError("these are no probabilities: every row must sum to 1; pass those of predict_proba")
        return found.astype(np.float32)

    def window(self, size: int = 1000) -> PriorWindow:
        """Keeps the estimate up to date for a stream of samples."""
        return PriorWindow(self, size)


class PriorWindow:
    """The estimate from the last samples of a stream.

    Args:
        estimator: of the classifier that gives the probabilities.
        size: number of samples that are kept.
    """

    def __init__(self, estimator: PriorEstimator, size: int = 1000) -> None:
        estimator.require_usable()
        self.estimator = estimator
        self.size = whole_number("size", size, at_least=FEWEST_SAMPLES)
        self._kept = np.empty((0, len(estimator.log_prior)), np.float32)

    def __len__(self) -> int:
        return len(self._kept)

    def update(self, probabilities: np.ndarray) -> None:
        """Add probabilities (B, K) of new samples; the oldest ones leave."""
        rows = self.estimator.as_probabilities(probabilities)
        self._kept = np.concatenate([self._kept, rows])[-self.size :]

    def estimate(self) -> PriorEstimate:
        """The target prior of the samples in the window."""
        return self.estimator.estimate(self._kept)


def check_prior(
    probabilities: np.ndarray, labels: np.ndarray, log_target: np.ndarray, log_prior: np.ndarray
) -> PriorCheck | None:
    """Try the estimate on unseen samples with probabilities (M, K) and labels (M,); None if they are too few.

    Classes without a sample are left out: their frequency under p is not known to the samples.
    """
    counts = np.bincount(labels, minlength=len(log_prior))
    usable = (counts > 0) & np.isfinite(log_prior) & np.isfinite(log_target)
    chosen = usable[labels]
    log_prior = np.where(usable, log_prior, -np.inf)
    if chosen.sum() < FEWEST_SAMPLES or not is_spread_out(log_prior):
        return None
    family = PowerFamily.of(log_prior, log_target)
    posteriors = np.asarray(probabilities, dtype=np.float64)[np.ix_(chosen, family.classes)]
    posteriors = posteriors / posteriors.sum(1, keepdims=True)
    codes = np.searchsorted(family.classes, labels[chosen])
    own = counts[family.classes][codes]
    found: list[tuple[float, float]] = []
    for known in (1.0, 0.0):
        weights = to_effective_number(np.exp(family.at(known))[codes] / own)
        peak = Peak.of(family.curve(posteriors, weights))
        # What each sample adds to the estimate, minus what its label adds to the estimate from labels.
        score, mean, variance = family.score(posteriors, peak.power)
        of_label = (family.log_prior[codes] - mean) / (weights.sum() * variance + 1)
        found.append((peak.power - known, float(np.linalg.norm(weights * (score / peak.curvature - of_label)))))
    misfits = [family.misfit(posteriors, power, np.exp(family.at(power))[codes] / own) for power in TRIED_MISFITS]
    distances, errors = (tuple(getattr(one, name) for one in misfits) for name in ("distance", "error"))
    return PriorCheck(len(codes), *found[0], *found[1], distances, errors)
