"""Scores of a long-tailed classifier: pure functions of predictions and labels.

Classes are grouped by their number of *training* images: many > 100, medium 20–100, few < 20
(Kang et al., Decoupling Representation and Classifier, ICLR 2020). A group without classes is
None, never 0. Classes absent from the test set are left out of the averages, of F1 too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from longtail.errors import UserError
from longtail.files.tensors import as_array
from longtail.metrics.confidence import Predictions, binned, gap
from longtail.metrics.table import BINARY_SCORES, SHOTS
from longtail.outputs.checks import as_label_matrix

MANY, FEW = 100, 20
SHOT_LIMITS = {"many": f"more than {MANY}", "medium": f"{FEW} to {MANY}", "few": f"fewer than {FEW}"}
LISTED_CLASSES = 1000  # with more classes nearly all cells of a confusion matrix are 0
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Metrics:
    """Scores of one model on one split; shares lie between 0 and 1. `longtail.metrics.SCORES` names them."""

    top1: float
    natural: float
    """Accuracy if classes are as frequent as in training; a calibration for balanced accuracy may lower it."""
    balanced: float
    many: float | None
    medium: float | None
    few: float | None
    macro_f1: float
    nll: float | None
    brier: float | None
    ece: float | None
    per_class: list[float | None]
    f1_per_class: list[float | None]
    samples: int
    cells: np.ndarray = field(repr=False, compare=False)
    """(M, 3): true class, predicted class, samples; the cells of the confusion matrix that are not 0."""
    roc_auc: float | None = None
    """Of two classes: how well the log-odds order the samples."""
    average_precision: float | None = None
    """Of two classes: of the class that is rarer in training, as the scores below."""
    precision: float | None = None
    """Of two classes: correct ones among predictions of the rarer; 1 / precision alarms find one sample."""
    flagged: float | None = None
    """Of two classes: the share of predictions of the rarer class."""

    def matrix(self) -> np.ndarray:
        """The confusion matrix (K, K) int64: rows are true classes, columns predicted ones."""
        full = np.zeros((len(self.per_class), len(self.per_class)), dtype=np.int64)
        full[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return full

    @property
    def confusion(self) -> list[list[int]]:
        """The confusion matrix as lists."""
        return self.matrix().tolist()

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the confusion matrix of many classes as its cells that are not 0."""
        hidden = ("cells",) if len(self.per_class) == 2 else ("cells", *BINARY_SCORES)
        scores = {name: value for name, value in vars(self).items() if name not in hidden}
        if len(self.per_class) > LISTED_CLASSES:
            return {**scores, "confusion_cells": self.cells.tolist()}
        return {**scores, "confusion": self.confusion}


def shot_groups(class_counts: np.ndarray) -> dict[str, np.ndarray]:
    """Which classes are many-, medium- and few-shot: a mask (K,) each.

    >>> groups = shot_groups(np.array([101, 100, 20, 19]))
    >>> {name: mask.nonzero()[0].tolist() for name, mask in groups.items()}
    {'many': [0], 'medium': [1, 2], 'few': [3]}
    """
    counts = np.asarray(class_counts)
    return {"many": counts > MANY, "medium": (counts >= FEW) & (counts <= MANY), "few": counts < FEW}


def shot_names(class_counts: np.ndarray) -> list[str]:
    """The group of each class.

    >>> shot_names(np.array([101, 19]))
    ['many', 'few']
    """
    groups = shot_groups(class_counts)
    return [next(name for name in SHOTS if groups[name][label]) for label in range(len(class_counts))]


def shot_accuracy(per_class: np.ndarray, class_counts: np.ndarray) -> dict[str, float | None]:
    """Mean accuracy of the classes in each group, None for an empty one."""
    groups = {name: per_class[mask & ~np.isnan(per_class)] for name, mask in shot_groups(class_counts).items()}
    return {name: float(scores.mean()) if len(scores) else None for name, scores in groups.items()}


def evaluate_predictions(
    predictions: ArrayLike, labels: ArrayLike, class_counts: ArrayLike, confidence: ArrayLike | None = None
) -> Metrics:
    """Every score that needs only predicted classes (N,); with their confidence (N,), also the calibration error."""
    best, truth = _classes(predictions, "predictions"), _classes(labels, "labels")
    metrics = _evaluate(best, truth, as_array(class_counts))
    if confidence is None:
        return metrics
    return replace(metrics, ece=gap(binned(as_array(confidence), best == truth)))


def evaluate(logits: ArrayLike, labels: ArrayLike, class_counts: ArrayLike) -> Metrics:
    """Every score of logits (N, K) against labels (N,), classes grouped by `class_counts` (K,)."""
    logits, labels, class_counts = as_array(logits), _classes(labels, "labels"), as_array(class_counts)
    if logits.ndim != 2 or logits.shape != (len(labels), len(class_counts)):
        raise UserError(
            f"logits {logits.shape}, labels {labels.shape} and class counts {class_counts.shape} do not fit together"
        )
    chunks = (logits[start : start + CHUNK_ROWS] for start in range(0, len(labels), CHUNK_ROWS))
    return evaluate_chunks(chunks, labels, class_counts)


def evaluate_chunks(chunks: Iterable[np.ndarray], labels: np.ndarray, class_counts: np.ndarray) -> Metrics:
    """Every score of logits that are read in chunks of rows, so that they need not fit into memory."""
    _require_known("label", labels, len(class_counts))
    return score_predictions(predictions_of(chunks, labels), labels, class_counts)


def predictions_of(chunks: Iterable[np.ndarray], labels: np.ndarray) -> Predictions:
    """Predictions from logits that are read in chunks of rows, for samples with labels (N,)."""
    parts, first = [], 0
    for chunk in chunks:
        parts.append(Predictions.of(chunk, labels[first : first + len(chunk)], first))
        first += len(chunk)
    return Predictions.joined(parts)


def score_predictions(predictions: Predictions, labels: np.ndarray, class_counts: np.ndarray) -> Metrics:
    """Every score of predictions for samples with labels (N,)."""
    metrics = evaluate_predictions(predictions.classes, labels, class_counts, predictions.confidence)
    if len(class_counts) == 2:
        rarer = rarer_of_two(class_counts)
        sign = 1 if rarer == 1 else -1  # the log-odds are those of class 1
        auc, average = ranking_scores(sign * predictions.log_odds, labels == rarer)
        flagged = predictions.classes == rarer
        precision = float((labels[flagged] == rarer).mean()) if flagged.any() else None
        metrics = replace(
            metrics, roc_auc=auc, average_precision=average, precision=precision, flagged=float(flagged.mean())
        )
    return replace(metrics, nll=float(predictions.nll.mean()), brier=float(predictions.brier.mean()))


def rarer_of_two(class_counts: np.ndarray) -> int:
    """The rarer of two classes, the positive one of binary scores; class 1 if both are as frequent.

    >>> rarer_of_two(np.array([5, 90])), rarer_of_two(np.array([90, 5])), rarer_of_two(np.array([5, 5]))
    (0, 1, 1)
    """
    return int(class_counts[1] <= class_counts[0])


def ranking_scores(scores: np.ndarray, positive: np.ndarray) -> tuple[float | None, float | None]:
    """ROC AUC and average precision of scores (N,); None without positive (N,) samples, and an AUC without others.

    >>> ranking_scores(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    (0.75, 0.8333333333333333)
    """
    if not positive.any():
        return None, None
    values, number, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    hits = np.bincount(number, positive, minlength=len(values))
    below = np.cumsum(sizes - hits) - (sizes - hits) / 2  # negatives below each value, half of the equal ones
    precision = np.cumsum(hits[::-1]) / np.cumsum(sizes[::-1])
    auc = None if positive.all() else float(hits @ below / (positive.sum() * (~positive).sum()))
    return auc, float(hits[::-1] @ precision / positive.sum())


def average_precision(scores: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """(K,) average precision of each label, from scores (N, K) of any unit and labels (N, K) of 0 and 1.

    NaN for a label without positives; `np.nanmean` of the result is the mean average precision (mAP). Scales and shifts
    per label, such as a calibration's, do not change it. A label in random order has its prevalence.

    >>> average_precision([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]], [[1, 1], [0, 0], [1, 0]]).round(2).tolist()
    [0.83, 0.33]
    """
    values, truth = as_array(scores), as_label_matrix(labels).numpy()
    if values.shape != truth.shape:
        raise UserError(f"scores have shape {values.shape}, but labels {truth.shape}")
    if not np.isfinite(values).all():
        raise UserError(f"scores of row {int(np.argmin(np.isfinite(values).all(1)))} are not finite")
    averages = [
        ranking_scores(column, positive)[1] for column, positive in zip(values.T, truth.T.astype(bool), strict=True)
    ]
    return np.array([np.nan if one is None else one for one in averages])


def _evaluate(predictions: np.ndarray, labels: np.ndarray, class_counts: np.ndarray) -> Metrics:
    num_classes = len(class_counts)
    _require_known("label", labels, num_classes)
    if len(predictions) != len(labels):
        raise UserError(f"{len(predictions)} predictions for {len(labels)} labels")
    _require_known("prediction", predictions, num_classes)
    of_class, taken_for, right = (
        np.bincount(classes, minlength=num_classes) for classes in (labels, predictions, labels[predictions == labels])
    )
    per_class = _share(right, of_class, of_class > 0)
    f1 = _share(2 * right, of_class + taken_for, of_class > 0)
    scored, f1_scored = ([None if np.isnan(one) else float(one) for one in scores] for scores in (per_class, f1))
    places, samples = np.unique(labels * num_classes + predictions, return_counts=True)
    return Metrics(
        top1=float((predictions == labels).mean()),
        natural=_at_training_prior(per_class, class_counts),
        balanced=float(np.nanmean(per_class)),
        **shot_accuracy(per_class, class_counts),
        macro_f1=float(np.nanmean(f1)),
        nll=None,
        brier=None,
        ece=None,
        per_class=scored,
        f1_per_class=f1_scored,
        samples=len(labels),
        cells=np.stack([places // num_classes, places % num_classes, samples], axis=1),
    )


def natural_accuracy(hits: np.ndarray, labels: np.ndarray, class_counts: np.ndarray) -> float:
    """Top-1 at the training prior, from whether each prediction (N,) is correct.

    >>> natural_accuracy(np.array([True, True, False]), np.array([0, 0, 1]), np.array([90, 10]))
    0.9
    """
    right, own = (np.bincount(part, minlength=len(class_counts)) for part in (labels[hits], labels))
    return _at_training_prior(_share(right, own, own > 0), class_counts)


def _at_training_prior(per_class: np.ndarray, class_counts: np.ndarray) -> float:
    """Accuracies (K,) weighted by training samples (K,), over the classes that have test samples."""
    present = ~np.isnan(per_class)
    weights = class_counts[present].astype(np.float64)
    return float(np.average(per_class[present], weights=weights if weights.any() else None))


def _require_known(name: str, classes: np.ndarray, num_classes: int) -> None:
    if len(classes) == 0:
        raise UserError("there are no labelled samples to evaluate on")
    if classes.min() < 0 or classes.max() >= num_classes:
        raise UserError(f"a {name} lies outside 0..{num_classes - 1}: {classes.min()} to {classes.max()}")


def _classes(values: ArrayLike, name: str) -> np.ndarray:
    """Class numbers (N,) int64."""
    array = as_array(values)
    if array.ndim != 1 or array.dtype.kind not in "iubf" or (array != np.floor(array)).any():
        raise UserError(f"{name} must be whole class numbers, shape (N,), not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _share(part: np.ndarray, whole: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`part / whole` where the mask is True, NaN elsewhere."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=where)
