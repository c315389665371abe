"""Mean logits and margins per class, as the paper defines them.

The margin of a sample to class j is its distance to the class's hyperplane, `d_j = eta_j / |W_j|`.
Class means: `eta_bar_j` averages `eta_j` over the samples *of class j*; `d_bar_j = eta_bar_j / |W_j|`.

Paper: Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022, section 3.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longtail.metrics.confidence import Predictions, Reliability, binned
from longtail.metrics.scores import Metrics, score_predictions
from longtail.outputs.checks import as_labels, as_logits, as_norms, check_rows, refuse_beside_outputs
from longtail.outputs.record import Outputs
from longtail.outputs.rows import LogitRows


@dataclass(frozen=True)
class ClassMeans:
    """Mean logit and mean margin of each class over its own samples, (K,); NaN where a class has none."""

    logits: np.ndarray
    margins: np.ndarray
    samples: np.ndarray


def margins(logits: Any, y: Any = None, *, weight_norms: Any = None) -> ClassMeans:
    """Class means of logits (N, K) with labels (N,), or of `Outputs`.

    Without `weight_norms` (K,) the norms are 1 and margins equal logits.

    >>> means = margins(np.array([[2.0, 0.0], [4.0, 1.0], [0.0, 3.0]]), [0, 0, 1], weight_norms=[2.0, 1.0])
    >>> means.logits.tolist(), means.margins.tolist()
    ([3.0, 3.0], [1.5, 3.0])
    """
    if isinstance(logits, Outputs):
        refuse_beside_outputs(y=y, weight_norms=weight_norms)
        rows = logits.rows()
        check_rows(rows)
        labels, _ = as_labels(logits.labels, rows.shape)
        norms = as_norms(logits.weight_norms, logits.num_classes)
    else:
        array = as_logits(logits)
        rows, classes = LogitRows(array), array.shape[1]
        labels, _ = as_labels(y, array.shape)
        norms = np.ones(classes) if weight_norms is None else as_norms(weight_norms, classes)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64)
    for where, chunk in rows.chunks():
        own = chunk.gather(1, labels[where].unsqueeze(1)).squeeze(1)
        sums.index_add_(0, labels[where], own.double())
    counts = np.bincount(labels.numpy(), minlength=len(sums))
    means = np.divide(sums.numpy(), counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return ClassMeans(means, means / norms, counts)


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
