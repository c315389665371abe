"""How good a long-tailed classifier is: pure functions on predictions and labels.

Classes are grouped by their number of *training* images: many > 100, medium 20–100, few < 20
(Kang et al., Decoupling Representation and Classifier, ICLR 2020). A group without classes is
None, never 0. Classes absent from the test set are left out of the averages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from longtail.errors import UserError
from longtail.precision import as_array

MANY, FEW = 100, 20
SHOTS = ("many", "medium", "few")


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
    confusion: list[list[int]]
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def confusion_matrix(predictions: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """(K, K) int64: rows are true classes, columns predicted ones."""
    cells = labels.astype(np.int64) * num_classes + predictions
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def per_class_accuracy(confusion: np.ndarray) -> np.ndarray:
    """Share of each class's samples that are recognised, (K,); NaN where a class has none."""
    totals = confusion.sum(1)
    return np.divide(confusion.diagonal(), totals, out=np.full(len(totals), np.nan), where=totals > 0)


def f1_scores(confusion: np.ndarray) -> np.ndarray:
    """F1 of each class, (K,); NaN where a class is neither present nor predicted."""
    size = confusion.sum(0) + confusion.sum(1)
    return np.divide(2 * confusion.diagonal(), size, out=np.full(len(size), np.nan), where=size > 0)


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


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over equally wide bins of confidence."""
    share, confidence, accuracy = reliability(probabilities, labels, bins)
    return float(np.nansum(share * np.abs(confidence - accuracy)))


def reliability(
    probabilities: np.ndarray, labels: np.ndarray, bins: int = 15
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per bin of confidence: share of samples, mean confidence, accuracy; NaN where a bin is empty."""
    confidence = probabilities.max(1)
    correct = probabilities.argmax(1) == labels
    # Bins are open below and closed above, as in Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    number = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    sizes = np.bincount(number, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(number, confidence, bins) / sizes
        accuracy = np.bincount(number, correct, bins) / sizes
    return sizes / len(labels), mean_confidence, accuracy


def evaluate_predictions(predictions: ArrayLike, labels: ArrayLike, class_counts: ArrayLike) -> Metrics:
    """Every score that needs predicted classes only; arrays, tensors or lists."""
    return _evaluate(_classes(predictions, "predictions"), _classes(labels, "labels"), as_array(class_counts), None)


def evaluate_logits(logits: ArrayLike, labels: ArrayLike, class_counts: ArrayLike) -> Metrics:
    """Every score of logits (N, K) against labels (N,), classes grouped by `class_counts` (K,)."""
    logits, labels, class_counts = as_array(logits), _classes(labels, "labels"), as_array(class_counts)
    if logits.ndim != 2 or logits.shape != (len(labels), len(class_counts)):
        raise UserError(
            f"logits {logits.shape}, labels {labels.shape} and class counts {class_counts.shape} do not fit together"
        )
    if not np.isfinite(logits).all():
        row = int(np.flatnonzero(~np.isfinite(logits).all(1))[0])
        raise UserError(f"logits of sample {row} are not finite")
    ece = expected_calibration_error(softmax(logits), labels) if len(labels) else None
    return _evaluate(logits.argmax(1), labels, class_counts, ece)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, K) in float64."""
    shifted = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def _evaluate(predictions: np.ndarray, labels: np.ndarray, class_counts: np.ndarray, ece: float | None) -> Metrics:
    if len(labels) == 0:
        raise UserError("there are no labelled samples to evaluate on")
    if len(predictions) != len(labels):
        raise UserError(f"{len(predictions)} predictions for {len(labels)} labels")
    num_classes = len(class_counts)
    for name, values in (("label", labels), ("prediction", predictions)):
        if values.min() < 0 or values.max() >= num_classes:
            raise UserError(f"a {name} lies outside 0..{num_classes - 1}: {values.min()} to {values.max()}")
    confusion = confusion_matrix(predictions, labels, num_classes)
    per_class, f1 = per_class_accuracy(confusion), f1_scores(confusion)
    return Metrics(
        top1=float((predictions == labels).mean()),
        balanced=float(np.nanmean(per_class)),
        **shot_accuracy(per_class, class_counts),
        macro_f1=float(np.nanmean(f1)),
        ece=ece,
        per_class=_listed(per_class),
        f1_per_class=_listed(f1),
        confusion=confusion.tolist(),
        samples=len(labels),
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
