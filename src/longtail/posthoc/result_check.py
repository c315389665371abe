"""Warn of a fit that does harm to the samples it was fitted on, or to the held-out samples it was given.

| warned of (`FitWarning`; nothing is refused) | samples |
|---|---|
| negative scales: the order of a class's logits is reversed | - |
| more numbers were fitted on held-out samples than there are of these (matrix scaling of many classes) | - |
| the AUC of pairs of classes falls by more than 0.01 | held-out; of the fit, if scales differ or it learns from them |
| the accuracy at the target prior falls (balanced accuracy, if that is uniform) | held-out; of the fit, if it learns |
| nearly all predictions become one rare class | the same |
| the likelihood falls, both as the samples are and at the target prior | the same |

A change counts if it is significant at 1 % by its own standard error, so that a neutral fit seldom warns, and a small
set hardly ever: paired differences of the same samples (McNemar's test, with a weight per class), DeLong's variance for
the AUC of two classes, the variance over pairs for the AUC of more. Two limits are judgement. A fall of the AUC by
less than 0.01 is significant in large sets, but of no use to know. More than 95 % of a balanced set predicted as one
class that has less than half of its even share of the samples leaves no other class more than 5 % of the predictions;
a model may have done so for its most frequent class before, which is no harm of the fit.

The AUC of classes c and d is that of the margin z_c - z_d among their samples: a shift per class, such as another
prior, does not change it, a scale per class does. With more than two classes its mean over pairs may fall if the
accuracy rises. A method whose setting is chosen on held-out samples, or that is fitted on them in addition to training
samples, is judged by them alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import rankdata

from longtail.posthoc.gate import SIGNIFICANT, log_likelihoods, rows_checked, warn

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


def check_fit_result(method: PostHoc, data: FitData, validation: FitData | None = None) -> None:
    """Warn if a fitted method makes the samples it was fitted on, or held-out samples, worse."""
    scales = np.asarray(getattr(method, "scale_", ()))
    if (scales < 0).any():
        warn(f"{_name(method)} reverses the order of the logits of {(scales < 0).sum()} classes (negative scales)")
    numbers, samples = getattr(method, "n_parameters_", 0), len(data.labels)
    if method.fitted_on_unseen and numbers > samples:
        warn(
            f"{_name(method)} fits {numbers:,} numbers on {samples:,} samples, so it learns them by heart and new "
            "samples become worse; take a method with fewer numbers, such as temperature or HALO"
        )
    learns = method.learns_from_seen and (method.fitted_on_unseen or not method.needs_validation)
    if learns or np.unique(scales).size > 1:
        _judge(method, data, "samples it was fitted on", only_order=not learns)
    if validation is not None and not method.fitted_on_unseen and not (learns and validation is data):
        _judge(method, validation, "held-out samples")


def _name(method: PostHoc) -> str:
    inner = method.wrapped if method.adds else None
    return type(method).__name__ if inner is None else f"{type(inner).__name__} + {method.adds}"


def _judge(method: PostHoc, data: FitData, samples: str, *, only_order: bool = False) -> None:
    chosen = rows_checked(data)
    logits, labels = data.rows.read(chosen), data.labels.numpy()[chosen]
    features = None if data.features is None else torch.from_numpy(np.asarray(data.features)[chosen]).float()
    if method.needs_features and features is None:
        return
    before, after = logits.double().numpy(), method._apply(logits, features).double().numpy()
    target = np.exp(np.asarray(getattr(method, "log_target_", np.zeros(data.num_classes))))
    weights = (target / np.maximum(np.bincount(labels, minlength=data.num_classes), 1))[labels]
    hits = _hits(after, labels) - _hits(before, labels)
    if before.shape[1] == 2 or not _falls(-hits, weights):
        _warn_of_lower_auc(_name(method), before, after, labels, samples)
    if only_order:
        return
    gain = log_likelihoods(after, labels) - log_likelihoods(before, labels)
    if _falls(hits, weights):
        worse = 100 * float(weights @ hits) / weights.sum()
        score = "balanced accuracy" if np.ptp(target) == 0 else "accuracy at the target prior"
        warn(f"{_name(method)} lowers the {score} of the {samples} by {-worse:.1f} points: {COMPARE}")
    elif np.ptp(target) == 0 and _warn_of_one_class(_name(method), before, after, labels, samples):
        return
    elif _falls(gain, weights) and _falls(gain, np.ones(len(labels))):
        warn(f"{_name(method)} lowers the likelihood of the {samples}: {COMPARE}")


def _warn_of_lower_auc(name: str, before: np.ndarray, after: np.ndarray, labels: np.ndarray, samples: str) -> None:
    """Warn if samples of two classes are no longer ordered as well by the difference of their logits."""
    changes, variances = _auc_changes(before, after, labels)
    if len(changes) == 0:
        return
    fall = -float(changes.mean())
    error = np.sqrt(variances[0]) if len(changes) == 1 else changes.std() / np.sqrt(len(changes))
    if fall > max(AUC_FALL, SIGNIFICANT * float(error)):
        pair = "the two classes" if before.shape[1] == 2 else "pairs of classes (mean)"
        warn(f"{name} lowers the AUC of {pair} by {fall:.3f} on the {samples}: {COMPARE}")


def _warn_of_one_class(name: str, before: np.ndarray, after: np.ndarray, labels: np.ndarray, samples: str) -> bool:
    balanced = 1 / np.bincount(labels)[labels]
    earlier, predicted = (
        np.bincount(logits.argmax(1), balanced, minlength=logits.shape[1]) / balanced.sum()
        for logits in (before, after)
    )
    most = int(predicted.argmax())
    of_class = float((labels == most).mean())
    if not predicted[most] > ONE_CLASS >= earlier[most] or of_class >= RARE / after.shape[1]:
        return False
    share = (after.argmax(1) == most).mean()
    warn(
        f"{name} predicts column {most} for {100 * share:.1f} % of the {samples}, of which {100 * of_class:.2g} % are "
        f"of that class: {COMPARE}"
    )
    return True


def _hits(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(B,) 1 where the prediction is correct."""
    return np.asarray(logits.argmax(1) == labels, dtype=float)


def _falls(change: np.ndarray, weights: np.ndarray) -> bool:
    """Whether a weighted mean is significantly below 0."""
    return bool(weights @ change < -SIGNIFICANT * np.sqrt(np.square(weights * change).sum()))


def _auc_changes(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P,) change of the AUC of the difference of two classes' logits, for pairs of classes, and its variance.

    The variance is that of DeLong et al., Comparing the areas under two or more correlated ROC curves, 1988.

    >>> right, y = np.eye(2)[[0, 1] * MIN_SAMPLES], np.array([0, 1] * MIN_SAMPLES)
    >>> [values.tolist() for values in _auc_changes(right, 1 - right, y)]
    [[-1.0], [0.0]]
    """
    counts = np.bincount(labels, minlength=before.shape[1])
    usual = np.flatnonzero(counts >= MIN_SAMPLES)
    firsts, seconds = (usual[side] for side in np.triu_indices(len(usual), 1))
    values = []
    for pair in np.linspace(0, len(firsts) - 1, min(len(firsts), MAX_PAIRS)).astype(int):
        first, second = firsts[pair], seconds[pair]
        rows = np.flatnonzero((labels == first) | (labels == second))
        own = labels[rows] == first
        margins = (logits[rows, first] - logits[rows, second] for logits in (before, after))
        old, new = (_placements(margin, own) for margin in margins)
        changes = [new[side] - old[side] for side in (own, ~own)]
        values.append((changes[0].mean(), sum(change.var(ddof=1) / len(change) for change in changes)))
    found = np.array(values).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _placements(margin: np.ndarray, own: np.ndarray) -> np.ndarray:
    """(B,) share of the samples of the other class that are on the right side of each sample."""
    ranks, below = rankdata(margin), np.empty(len(margin))
    for side in (own, ~own):
        below[side] = (ranks[side] - rankdata(margin[side])) / (~side).sum()
    return np.where(own, below, 1 - below)
