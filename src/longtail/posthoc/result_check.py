"""Warn of a fit that does harm to the samples it was fitted on.

| warned of (`FitWarning`; nothing is refused) | which methods |
|---|---|
| negative scales: the order of a class's logits is reversed | all with scales |
| the AUC of pairs of classes falls by more than 0.01 | all with scales, and all that learn from the samples |
| the balanced accuracy falls | all that learn from the samples |
| nearly all predictions become one rare class | all that learn from the samples |
| the likelihood falls, both as the samples are and with classes of equal weight | `minimises_softmax_loss` |

The AUC of classes c and d is that of the margin z_c - z_d among their samples: a shift per class, such as another
prior, does not change it, a scale per class does. With more than two classes its mean over pairs may fall if the
balanced accuracy rises. Apart from the AUC of two classes, a change counts if it is larger than two standard errors.
Methods that are fitted or chosen on held-out samples in addition to training samples are not judged by the latter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import rankdata

from longtail.posthoc.gate import log_likelihoods, rows_checked, warn

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc
    from longtail.posthoc.inputs import FitData

AUC_FALL = 0.01
MIN_SAMPLES, MAX_PAIRS = 10, 200  # AUC: samples of a class that is considered, pairs of classes
ONE_CLASS = 0.95  # share of predictions on a balanced set
RARE = 0.5  # samples of a class, relative to the mean over classes
COMPARE = (
    "compare it with the unchanged model on held-out samples before you use it, or fit HALO on them (--method halo)"
)


def check_fit_result(method: PostHoc, data: FitData) -> None:
    """Warn if a fitted method makes the samples it was fitted on worse."""
    name, scales = type(method).__name__, np.asarray(getattr(method, "scale_", ()))
    if (scales < 0).any():
        warn(f"{name} reverses the order of the logits of {(scales < 0).sum()} classes (negative scales)")
    learns = method.learns_from_seen and (method.fitted_on_unseen or not method.needs_validation)
    if not learns and np.unique(scales).size < 2:
        return
    chosen = rows_checked(data)
    logits, labels = data.rows.read(chosen), data.labels.numpy()[chosen]
    features = None if data.features is None else torch.from_numpy(np.asarray(data.features)[chosen]).float()
    before, after = logits.double().numpy(), method._apply(logits, features).double().numpy()
    _warn_of_lower_auc(name, before, after, labels)
    if learns:
        _warn_of_worse_predictions(name, before, after, labels, likelihood=method.minimises_softmax_loss)


def _warn_of_lower_auc(name: str, before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> None:
    """Warn if samples of two classes are no longer ordered as well by the difference of their logits."""
    if before.shape[1] > 2 and _falls(_hits(before, labels) - _hits(after, labels), _balanced(labels)):
        return
    change = _pair_aucs(after, labels) - _pair_aucs(before, labels)
    fall = -float(change.mean()) if len(change) else 0.0
    if fall > AUC_FALL and (len(change) == 1 or _falls(change, np.ones(len(change)))):
        pair = "the two classes" if before.shape[1] == 2 else "pairs of classes (mean)"
        warn(
            f"{name} lowers the AUC of {pair} by {fall:.3f} on the samples it was fitted on: different scales per "
            f"class change the order of samples; {COMPARE}"
        )


def _warn_of_worse_predictions(
    name: str, before: np.ndarray, after: np.ndarray, labels: np.ndarray, *, likelihood: bool
) -> None:
    balanced, change = _balanced(labels), _hits(after, labels) - _hits(before, labels)
    predicted, earlier = _balanced_shares(after, balanced), _balanced_shares(before, balanced)
    most = int(predicted.argmax())
    of_class = float((labels == most).mean())
    if _falls(change, balanced):
        worse = 100 * float(balanced @ change) / balanced.sum()
        warn(f"{name} lowers the balanced accuracy of the samples it was fitted on by {-worse:.1f} points: {COMPARE}")
    elif predicted[most] > ONE_CLASS >= earlier[most] and of_class < RARE / after.shape[1]:
        share = (after.argmax(1) == most).mean()
        warn(
            f"{name} predicts column {most} for {100 * share:.1f} % of the samples it was fitted on, of which "
            f"{100 * of_class:.2g} % are of that class: {COMPARE}"
        )
    elif likelihood:
        gain = log_likelihoods(after, labels) - log_likelihoods(before, labels)
        if _falls(gain, balanced) and _falls(gain, np.ones(len(labels))):
            warn(f"{name} lowers the likelihood of the samples it was fitted on: {COMPARE}")


def _hits(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(B,) 1 where the prediction is correct."""
    return np.asarray(logits.argmax(1) == labels, dtype=float)


def _balanced(labels: np.ndarray) -> np.ndarray:
    """(B,) weights with which every class weighs the same."""
    return np.asarray(1 / np.bincount(labels)[labels])


def _balanced_shares(logits: np.ndarray, balanced: np.ndarray) -> np.ndarray:
    """(K,) share of the predictions of each class, on a set in which every class is equally frequent."""
    return np.bincount(logits.argmax(1), balanced, minlength=logits.shape[1]) / balanced.sum()


def _falls(change: np.ndarray, weights: np.ndarray) -> bool:
    """Whether a weighted mean is below 0 by more than two standard errors."""
    return bool(weights @ change < -2 * np.sqrt(np.square(weights * change).sum()))


def _pair_aucs(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(P,) AUC of the difference of the logits of two classes, for pairs of classes.

    >>> _pair_aucs(np.eye(2)[[0, 1] * MIN_SAMPLES], np.array([0, 1] * MIN_SAMPLES)).tolist()
    [1.0]
    """
    counts = np.bincount(labels, minlength=logits.shape[1])
    usual = np.flatnonzero(counts >= MIN_SAMPLES)
    firsts, seconds = (usual[side] for side in np.triu_indices(len(usual), 1))
    values = []
    for pair in np.linspace(0, len(firsts) - 1, min(len(firsts), MAX_PAIRS)).astype(int):
        first, second = firsts[pair], seconds[pair]
        rows = np.flatnonzero((labels == first) | (labels == second))
        positive = labels[rows] == first
        ranks = rankdata(logits[rows, first] - logits[rows, second])
        wins = ranks[positive].sum() - counts[first] * (counts[first] + 1) / 2
        values.append(wins / (counts[first] * counts[second]))
    return np.array(values)
