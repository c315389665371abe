"""What a classifier does on one split: scores, class means, calibration, correlation with class size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from longtail.metrics.margins import ClassMeans, margins
from longtail.metrics.scores import Metrics, evaluate_logits, reliability, softmax
from longtail.outputs.record import Outputs

BINS = 15


@dataclass(frozen=True)
class State:
    """One classifier on the held-out images: as trained, or repaired."""

    title: str
    metrics: Metrics
    means: ClassMeans
    reliability: tuple[np.ndarray, np.ndarray, np.ndarray]
    correlation: dict[str, float]
    """Rank correlation of mean logit and mean margin with class size."""
    predictions: np.ndarray
    parameters: int | None = None


def describe_state(title: str, logits: np.ndarray, outputs: Outputs, parameters: int | None = None) -> State:
    """Scores, class means and calibration of logits (N, K) on the labels of `outputs`."""
    means = margins(logits, outputs.labels, weight_norms=outputs.weight_norms)
    present = means.samples > 0
    correlation = {
        name: _rank_correlation(values[present], outputs.class_counts[present])
        for name, values in (("logits", means.logits), ("margins", means.margins))
    }
    return State(
        title=title,
        metrics=evaluate_logits(logits, outputs.labels, outputs.class_counts),
        means=means,
        reliability=reliability(softmax(logits), outputs.labels, BINS),
        correlation=correlation,
        predictions=logits.argmax(1),
        parameters=parameters,
    )


def _rank_correlation(values: np.ndarray, counts: np.ndarray) -> float:
    if len(values) < 2 or np.ptp(values) == 0 or np.ptp(counts) == 0:
        return 0.0
    return float(spearmanr(values, counts).statistic)
