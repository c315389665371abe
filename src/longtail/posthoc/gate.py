"""A gate before every fit: samples that cannot be what they seem are refused, suspicious ones warned of in one line.

| refused (`UserError`) | warned of (`FitWarning`) |
|---|---|
| probabilities or percentages: more than 90 % of the rows sum to 1 or 100 | logits that all lie between 0 and 1 |
| every row of logits (and of features) is the same | logits divided by a constant: right more often than sure |
| labels in a random order, strong evidence (see below) | the same, weaker evidence; less agreement than chance |
| columns in another order, if most samples fit that order | columns in another order, if it fits better |
| | class counts in another order than the labels |

Labels of other rows are detected by ranks, which depend neither on the scale of the logits nor on a prior. With R_ic
the centred rank of sample i among all samples by the logit of class c, `T = sum_i R_{i, y_i}` has mean 0 if the labels
are in a random order, and

    Var T = (sum_i sum_c n_c R_ic^2 - sum_i (sum_c n_c R_ic)^2 / N) / (N - 1)

A model whose probabilities were right would have `T = C = sum_ic p_ic R_ic`. Overconfidence and label noise leave an
unknown share f of it. With z = T / sd:

- Warned of: z is not significant at 1 %, although f = 1/2 would be with a power of 99 % (C / sd > 9.3). Agreement that
  is significant passes, however weak; so do sets that are too small, and models that are too unsure, for such a test,
  unless z is significantly below 0.
- Refused: strong evidence in addition, a Bayes factor of at least 20 (Kass and Raftery, Bayes Factors, JASA 1995) of a
  random order, z ~ N(0, 1), against z ~ N(f C / sd, 1) with every f between 0 and 1 equally probable. z significantly
  below 0 is only warned of: that is no random order. A model that has learnt nothing looks the same and is refused too.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import log_softmax, softmax
from scipy.stats import norm, rankdata

from longtail.errors import UserError
from longtail.posthoc.priors import USUAL_SPREAD, like_training

if TYPE_CHECKING:
    from longtail.posthoc.inputs import FitData

MAX_LOGITS_CHECKED, MIN_ROWS_CHECKED = 1 << 20, 2000  # logits that are read, but at least so many rows
SIGNIFICANT, HIGHLY_SIGNIFICANT = 2.33, 4.0  # standard deviations: one in a hundred, one in thirty thousand
DETECTABLE = 2 * (SIGNIFICANT + SIGNIFICANT)  # half of it is significant with a power of 99 %
STRONG_EVIDENCE = 20.0  # Bayes factor
ROW_SUMS = {1: "probabilities", 100: "percentages"}
ROUNDING = 1e-6  # relative difference of float32 numbers that are equal up to rounding


class FitWarning(UserWarning):
    """The samples or the result of a fit may not be what they should be."""


def warn(message: str) -> None:
    """Warn in one line."""
    warnings.warn(message, FitWarning, stacklevel=2)


def check_fit_inputs(data: FitData) -> None:
    """Refuse or warn of samples that are not logits, do not vary, or do not fit their labels or class counts."""
    chosen = rows_checked(data)
    stored, labels = data.rows.read(chosen).double().numpy(), data.labels.numpy()[chosen]
    _refuse_probabilities(stored)
    if len(np.unique(labels)) < 2:
        return
    logits = stored - stored.mean(1, keepdims=True)
    if np.ptp(logits, axis=0).max() <= ROUNDING * np.abs(stored).max():
        # Features that vary are enough for methods that replace the head.
        features = None if data.features is None else np.asarray(data.features)[chosen]
        if features is None or np.ptp(features, axis=0).max() <= ROUNDING * np.abs(features).max():
            raise UserError(
                f"every sample has the same logits ({len(data.labels):,} rows): the model has collapsed, or its inputs "
                "are all the same; there is nothing to calibrate"
            )
        return
    agreement, deviation, expected = rank_agreement(logits, labels)
    z, expected_z = (agreement / deviation, expected / deviation) if deviation > 0 else (0.0, 0.0)
    _check_counts(data, logits, labels)
    _check_columns(data, logits, labels, z)
    _check_agreement(logits, labels, z, expected_z)
    _check_scale(stored, logits, labels, z)


def rows_checked(data: FitData) -> np.ndarray:
    """Evenly spaced rows, so many that reading them takes little time."""
    size, classes = data.rows.shape
    return np.linspace(0, size - 1, min(size, max(MAX_LOGITS_CHECKED // classes, MIN_ROWS_CHECKED))).astype(np.int64)


def log_likelihoods(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(B,) log-likelihood of each sample; 0 for a class that a target prior rules out."""
    values = log_softmax(logits, axis=1)[np.arange(len(labels)), labels]
    return np.where(np.isfinite(values), values, 0.0)


def rank_agreement(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
    """T, its standard deviation for labels in a random order, and the T of a model that is as sure as this one."""
    ranks, size = rankdata(logits, axis=0), len(labels)
    ranks = np.asarray((ranks - ranks.mean(0)) / size)  # within each column, between -1/2 and 1/2
    counts = np.bincount(labels, minlength=logits.shape[1])
    squares = float((np.square(ranks) @ counts).sum() - np.square(ranks @ counts).sum() / size)
    agreement = float(ranks[np.arange(size), labels].sum())
    expected = float((softmax(logits, axis=1) * ranks).sum())
    largest = float((counts * (1 - counts / size)).sum()) / 2  # if every class had the highest ranks of its column
    return agreement, np.sqrt(max(squares, 0.0) / max(size - 1, 1)), min(expected, largest)


def _refuse_probabilities(logits: np.ndarray) -> None:
    """Most rows, not all: a row of zeros, or one that was rounded, makes no logits of the others."""
    sums = logits.sum(1)
    for total, name in ROW_SUMS.items():
        are = (logits >= 0).all(1) & (np.abs(sums / total - 1) < 0.02)
        if len(logits) > 1 and are.mean() > 0.9:
            raise UserError(
                f"these are {name}, not logits: {are.sum():,} of {len(are):,} rows sum to {total}; "
                f"pass logits, or log({name})"
            )


def _check_counts(data: FitData, logits: np.ndarray, labels: np.ndarray) -> None:
    """Training counts that are those of the samples in another order.

    A held-out set may well be distributed like that. Then the logits, right for the training counts, gain by the
    correction log(samples / counts); if the counts are in the wrong order, they lose.
    """
    seen, counts = data.seen_counts, np.asarray(data.class_counts, dtype=float)
    if (seen == counts).all() or (seen == 0).any() or like_training(seen, counts):
        return
    is_balanced = like_training(np.full(len(seen), len(data.labels) / len(seen)), counts)
    if is_balanced or not like_training(np.sort(seen), np.sort(counts)):
        return
    corrected = log_likelihoods(logits + np.log(seen / np.maximum(counts, 1)), labels)
    if corrected.mean() > log_likelihoods(logits, labels).mean():
        return
    most, largest = data.class_names[int(seen.argmax())], data.class_names[int(counts.argmax())]
    warn(
        f"class_counts are in another order than the labels: most samples are of class {most} ({seen.max():,}), but "
        f"class {largest} has the largest count ({counts.max():,.0f}); give the counts in the order of the columns"
    )


def _check_columns(data: FitData, logits: np.ndarray, labels: np.ndarray, z: float) -> None:
    """Columns that predict other classes than their own.

    Which column belongs to which class is taken from half of the samples, and tried on the others.
    """
    predicted, classes, names = logits.argmax(1), logits.shape[1], data.class_names
    first = np.arange(len(labels)) % 2 == 0
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (labels[first], predicted[first]), 1)
    confusion /= np.maximum(confusion.sum(1, keepdims=True), 1)
    if (confusion.argmax(1) == np.arange(classes))[confusion.any(1)].all():
        return
    column = linear_sum_assignment(confusion + 1e-9 * np.eye(classes), maximize=True)[1]
    others = labels[~first]
    gain = (predicted[~first] == column[others]).astype(float) - (predicted[~first] == others)
    weights = 1 / np.bincount(others, minlength=classes)[others]
    error = float(np.sqrt(np.square(weights * gain).sum()))
    if error == 0 or (weights @ gain) / error < HIGHLY_SIGNIFICANT:
        return
    moved = np.flatnonzero(column != np.arange(classes))
    one = moved[np.argmax(confusion[moved, column[moved]])]
    message = (
        f"samples of class {names[one]} are mostly predicted as class {names[column[one]]}, and so for {len(moved)} of "
        f"{classes} classes: the columns of the logits and the labels seem to be in a different order of classes"
    )
    present = np.count_nonzero(np.bincount(others, minlength=classes))
    agree = weights @ (predicted[~first] == column[others]) / present
    if classes > 2 and agree - HIGHLY_SIGNIFICANT * error / present > 0.5 and z < SIGNIFICANT:
        raise UserError(message)
    warn(message)


def _check_agreement(logits: np.ndarray, labels: np.ndarray, z: float, expected_z: float) -> None:
    """Labels that agree with the logits no more than by chance, though the model is sure of its predictions."""
    if z >= SIGNIFICANT or (expected_z < DETECTABLE and z > -SIGNIFICANT):
        return
    how, why = (
        "no more than",
        "labels and logits may be in a different order of samples; save both in one pass, unshuffled",
    )
    if z <= -SIGNIFICANT:
        how, why = "less than", "two classes may be exchanged, in the labels or in the columns of the logits"
    message = (
        f"the logits agree with the labels {how} by chance ({100 * (logits.argmax(1) == labels).mean():.1f} % "
        f"of {len(labels):,} predictions are correct): {why}"
    )
    # Bayes factor of labels in a random order against labels of these rows.
    evidence = expected_z * norm.pdf(z) / (norm.cdf(z) - norm.cdf(z - expected_z))
    # Significantly less than chance is no random order either: such a model exists.
    if z > -SIGNIFICANT and evidence >= STRONG_EVIDENCE:
        raise UserError(message)
    warn(message)


def _check_scale(stored: np.ndarray, logits: np.ndarray, labels: np.ndarray, z: float) -> None:
    """Logits whose softmax is less sure than the predictions are right: multiplied by a small number, or sigmoids."""
    if z < HIGHLY_SIGNIFICANT:
        return
    if stored.min() >= 0 and stored.max() <= 1:
        warn("all logits lie between 0 and 1: if they are probabilities (sigmoids), pass log(p / (1 - p)) instead")
        return
    spread, accuracy = float(logits.std()), float((logits.argmax(1) == labels).mean())
    confidence = softmax(logits, axis=1).max(1)
    error = float(np.sqrt((confidence * (1 - confidence)).sum())) / len(confidence)
    if spread < USUAL_SPREAD[0] and accuracy - confidence.mean() > HIGHLY_SIGNIFICANT * error:
        warn(
            f"the logits of a sample differ by {spread:.1g} (standard deviation), a softmax is {confidence.mean():.0%} "
            f"sure, yet {accuracy:.0%} of the predictions are correct: pass the logits as the last layer gives "
            "them, not divided by a constant"
        )
