"""How well a model's confidence matches its accuracy: per sample, and in bins of confidence.

    NLL = -log p_y          Brier = sum_j (p_j - [j = y])^2          ECE = mean |confidence - accuracy| over bins

Papers: Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (ECE); Brier, Verification of
forecasts expressed in terms of probability, 1950.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from longtail.errors import UserError

BINS = 15
Reliability = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for N samples, one array (N,) per field: enough for every score, without the logits.

    Args:
        classes: the most probable class.
        confidence: its probability.
        nll: negative logarithm of the true class's probability.
        brier: squared distance of the probabilities from the one-hot label.
        log_odds: of the last class against the first; with two classes, what ROC AUC and average precision need.
    """

    classes: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray
    brier: np.ndarray
    log_odds: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, labels: np.ndarray, first: int = 0) -> Self:
        """From logits (N, K) and labels (N,); rows are numbered from `first` in errors."""
        if not np.isfinite(logits).all():
            raise UserError(f"logits of sample {first + int(np.argmin(np.isfinite(logits).all(1)))} are not finite")
        rows = np.arange(len(logits))
        shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
        own = shifted[rows, labels]
        shares = np.exp(shifted, out=shifted)
        total = shares.sum(1)
        shares /= total[:, None]
        classes = logits.argmax(1)
        brier = np.square(shares).sum(1) - 2 * shares[rows, labels] + 1
        log_odds = logits[:, -1].astype(np.float64) - logits[:, 0]
        return cls(classes, shares[rows, classes], np.log(total) - own, brier, log_odds)

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Concatenate several parts."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def take(self, rows: np.ndarray) -> Self:
        """Some of the samples."""
        return type(self)(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, K) in float64."""
    shifted = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Mean gap between confidence and accuracy over equally wide bins of confidence."""
    return gap(reliability(probabilities, labels, bins))


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> Reliability:
    """Per bin of confidence: share of samples, mean confidence, accuracy; NaN where a bin is empty."""
    return binned(probabilities.max(1), probabilities.argmax(1) == labels, bins)


def binned(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> Reliability:
    """Reliability bins from confidence (N,) and whether each prediction is correct (N,)."""
    # Bins are open below and closed above, as in Guo et al.
    number = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    sizes = np.bincount(number, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(number, confidence, bins) / sizes
        accuracy = np.bincount(number, correct, bins) / sizes
    return sizes / len(correct), mean_confidence, accuracy


def gap(bins: Reliability) -> float:
    """Expected calibration error of bins."""
    share, confidence, accuracy = bins
    return float(np.nansum(share * np.abs(confidence - accuracy)))
