"""How good a long-tailed classifier is: pure functions on predictions and labels.

Classes are grouped by their number of *training* images: many > 100, medium 20–100, few < 20
(Kang et al., Decoupling Representation and Classifier, ICLR 2020). A group without classes is
None, never 0. Classes absent from the test set are left out of the averages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from longtail.core.arrays import as_array
from longtail.errors import UserError

MANY, FEW = 100, 20
SHOTS = ("many", "medium", "few")
LISTED_CLASSES = (
    1000  # with more of them a confusion matrix is nearly all zeros, and a file of it is not read by anybody
)
CHUNK_ROWS = 1024
BINS = 15


@dataclass(frozen=True)
class Metrics:
    """Scores of one model on one split; shares lie between 0 and 1."""

    top1: float
    balanced: float
    many: float | None
    medium: float | None
    few: float | None
    macro_f1: float
    ece: float | None
    per_class: list[float | None]
    f1_per_class: list[float | None]
    samples: int
    cells: np.ndarray = field(repr=False, compare=False)
    """(M, 3): true class, predicted class, samples; the cells of the confusion matrix that are not 0."""

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
        scores = {name: value for name, value in vars(self).items() if name != "cells"}
        if len(self.per_class) > LISTED_CLASSES:
            return {**scores, "confusion_cells": self.cells.tolist()}
        return {**scores, "confusion": self.confusion}


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Part by whole, NaN where there is nothing."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def shot_groups(class_counts: np.ndarray) -> dict[str, np.ndarray]:
    """Which classes are many-, medium- and few-shot: a mask (K,) each.

    >>> groups = shot_groups(np.array([101, 100, 20, 19]))
    >>> {name: mask.nonzero()[0].tolist() for name, mask in groups.items()}
    {'many': [0], 'medium': [1, 2], 'few': [3]}
    """
    counts = np.asarray(class_counts)
    return {"many": counts > MANY, "medium": (counts >= FEW) & (counts <= MANY), "few": counts < FEW}


def shot_accuracy(per_class: np.ndarray, class_counts: np.ndarray) -> dict[str, float | None]:
    """Mean accuracy of the classes in each group, None for an empty one."""
    groups = shot_groups(class_counts).items()
    return {name: _mean(per_class[mask]) for name, mask in groups}


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Mean gap between confidence and accuracy over equally wide bins of confidence."""
    return _gap(*reliability(probabilities, labels, bins))


def _gap(share: np.ndarray, confidence: np.ndarray, accuracy: np.ndarray) -> float:
    return float(np.nansum(share * np.abs(confidence - accuracy)))


def reliability(
    probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per bin of confidence: share of samples, mean confidence, accuracy; NaN where a bin is empty."""
    return _reliability(probabilities.max(1), probabilities.argmax(1) == labels, bins)


def _reliability(confidence: np.ndarray, correct: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Bins are open below and closed above, as in Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    number = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    sizes = np.bincount(number, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(number, confidence, bins) / sizes
        accuracy = np.bincount(number, correct, bins) / sizes
    return sizes / len(correct), mean_confidence, accuracy


def evaluate_predictions(
    predictions: ArrayLike, labels: ArrayLike, class_counts: ArrayLike, confidence: ArrayLike | None = None
) -> Metrics:
    """Every score that needs predicted classes (N,) only; with their confidence (N,) the calibration error too."""
    best, truth = _classes(predictions, "predictions"), _classes(labels, "labels")
    metrics = _evaluate(best, truth, as_array(class_counts))
    if confidence is None:
        return metrics
    return replace(metrics, ece=_gap(*_reliability(as_array(confidence), best == truth, BINS)))


def evaluate_logits(logits: ArrayLike, labels: ArrayLike, class_counts: ArrayLike) -> Metrics:
    """Every score of logits (N, K) against labels (N,), classes grouped by `class_counts` (K,)."""
    logits, labels, class_counts = as_array(logits), _classes(labels, "labels"), as_array(class_counts)
    if logits.ndim != 2 or logits.shape != (len(labels), len(class_counts)):
        raise UserError(
            f"logits {logits.shape}, labels {labels.shape} and class counts {class_counts.shape} do not fit together"
        )
    return evaluate_chunks(
        (logits[start : start + CHUNK_ROWS] for start in range(0, len(labels), CHUNK_ROWS)), labels, class_counts
    )


def evaluate_chunks(chunks: Iterable[np.ndarray], labels: np.ndarray, class_counts: np.ndarray) -> Metrics:
    """The same of logits that come some rows at a time, so that they need not fit into memory."""
    found, first = [predicted(np.zeros((0, 1)))], 0
    for chunk in chunks:
        found.append(predicted(chunk, first))
        first += len(chunk)
    predictions, confidence = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return evaluate_predictions(predictions, labels, class_counts, confidence)


def predicted(logits: np.ndarray, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The best class of each row of logits (N, K) and its probability; rows are numbered from `first` in errors."""
    if not np.isfinite(logits).all():
        raise UserError(f"logits of sample {first + int(np.argmin(np.isfinite(logits).all(1)))} are not finite")
    return logits.argmax(1), softmax(logits).max(1)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, K) in float64."""
    shifted = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def _evaluate(predictions: np.ndarray, labels: np.ndarray, class_counts: np.ndarray) -> Metrics:
    if len(labels) == 0:
        raise UserError("there are no labelled samples to evaluate on")
    if len(predictions) != len(labels):
        raise UserError(f"{len(predictions)} predictions for {len(labels)} labels")
    num_classes = len(class_counts)
    for name, values in (("label", labels), ("prediction", predictions)):
        if values.min() < 0 or values.max() >= num_classes:
            raise UserError(f"a {name} lies outside 0..{num_classes - 1}: {values.min()} to {values.max()}")
    of_class, taken_for, right = (
        np.bincount(classes, minlength=num_classes) for classes in (labels, predictions, labels[predictions == labels])
    )
    per_class, f1 = _share(right, of_class), _share(2 * right, of_class + taken_for)
    places, samples = np.unique(labels * num_classes + predictions, return_counts=True)
    return Metrics(
        top1=float((predictions == labels).mean()),
        balanced=float(np.nanmean(per_class)),
        **shot_accuracy(per_class, class_counts),
        macro_f1=float(np.nanmean(f1)),
        ece=None,
        per_class=_listed(per_class),
        f1_per_class=_listed(f1),
        samples=len(labels),
        cells=np.stack([places // num_classes, places % num_classes, samples], axis=1),
    )


def _classes(values: ArrayLike, name: str) -> np.ndarray:
    """Class numbers (N,) int64."""
    array = as_array(values)
    if array.ndim != 1 or array.dtype.kind not in "iubf" or (array != np.floor(array)).any():
        raise UserError(f"{name} must be whole class numbers, shape (N,), not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _mean(values: np.ndarray) -> float | None:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else None


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
