"""One classifier on held-out images: scores, mean logits and margins, confidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.metrics.confidence import Predictions, Reliability, binned
from longtail.metrics.margins import ClassMeans, margins
from longtail.metrics.scores import Metrics, score_predictions
from longtail.outputs.record import Outputs


@dataclass(frozen=True)
class State:
    """A classifier as trained, or calibrated."""

    title: str
    metrics: Metrics
    means: ClassMeans
    reliability: Reliability
    correlation: dict[str, float]
    """Rank correlation of mean logit and mean margin with class size."""
    predictions: np.ndarray
    parameters: int | None = None


def describe_state(title: str, logits: np.ndarray, outputs: Outputs, parameters: int | None = None) -> State:
    """Scores, class means and confidence of logits (N, K) on the labels of `outputs`."""
    means = margins(logits, outputs.labels, weight_norms=outputs.weight_norms)
    present = means.samples > 0
    correlation = {
        name: rank_correlation(values[present], outputs.class_counts[present])
        for name, values in (("logits", means.logits), ("margins", means.margins))
    }
    found = Predictions.of(logits, outputs.labels)
    return State(
        title=title,
        metrics=score_predictions(found, outputs.labels, outputs.counts_for_groups),
        means=means,
        reliability=binned(found.confidence, found.classes == outputs.labels),
        correlation=correlation,
        predictions=found.classes,
        parameters=parameters,
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where one of the two does not vary.

    >>> rank_correlation(np.array([1.0, 3.0, 2.0]), np.array([10, 30, 20]))
    1.0
    """
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return round(float(np.corrcoef(_ranks(first), _ranks(second))[0, 1]), 12)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks starting at 1; equal values get their mean rank."""
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts + 1) / 2)[codes]
