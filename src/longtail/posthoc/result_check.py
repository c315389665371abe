"""Warn of a fit that does harm to the samples it was fitted on, to held-out samples, or to samples it has not used.

| warned of (`FitWarning`; nothing is refused) | samples |
|---|---|
| negative scales: the order of a class's logits is reversed | - |
| more numbers were fitted on held-out samples than there are of these (matrix scaling of many classes) | - |
| the AUC of pairs of classes falls by more than 0.01 | held-out; of the fit, if scales differ or it learns from them |
| the accuracy at the target prior falls (balanced accuracy, if that is uniform) | held-out; of the fit, if it learns |
| nearly all predictions become one rare class | the same |
| the likelihood falls, both as the samples are and at the target prior | the same |
| any of this, although the samples of the fit do not show it: it learns them by heart | left out of the fit |

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

Samples left out of the fit: methods that fit several numbers per class on features, or on held-out samples, are fitted
again in three folds. Harm of the AUC counts there if the fit looks better on its own samples than on those left out,
significantly at 5 %: so few samples of a rare class as make such a method harmful never show its harm by themselves.
A gain of 0.025 that is not surely there on the samples left out is reported, too. A network has seen the training
samples, and an accuracy near 100 % falls in any fold, so these are judged by AUC alone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import rankdata

from longtail.data.imbalance import subsample_per_class
from longtail.posthoc.gate import SIGNIFICANT, log_likelihoods, rows_checked, warn
from longtail.posthoc.held_out import FEWEST_FOLDS, calibrated_logits, out_of_fold_logits, stratified_folds
from longtail.posthoc.solver.affine import largest_subsample

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc
    from longtail.posthoc.inputs import FitData

AUC_FALL, BY_HEART = 0.01, 0.025
LIKELY = 1.64  # standard deviations, 5 %: that a fit looks better on its own samples is expected
MIN_SAMPLES, MAX_PAIRS = 5, 200  # AUC: samples of a class that is considered, pairs of classes
ONE_CLASS = 0.95  # share of predictions on a balanced set
RARE = 0.5  # samples of a class, relative to the mean over classes
MAX_CROSS_FIT = 1 << 29  # fitted numbers times samples of a cross-fit
OF_LARGE_CLASS = (100, 20_000)  # samples that a large class is reduced to, at least and at most
COMPARE = "compare it with the unchanged model on held-out samples before you use it"
LEFT_OUT = "samples left out of the fit, in three folds"


@dataclass(frozen=True)
class Judged:
    """Logits of samples before and after a fit.

    Args:
        name: of the method.
        samples: in words.
        before: (B, K).
        after: (B, K).
        labels: (B,).
        target: (K,) the prior that the method is fitted for.
        fitted: (B, K) logits by a fit that has used these samples, if `after` are by fits that have not.
        fold: (B,) which of these fits; samples are compared with those of their fold, as fits differ by a shift.
    """

    name: str
    samples: str
    before: np.ndarray
    after: np.ndarray
    labels: np.ndarray
    target: np.ndarray
    fitted: np.ndarray | None = None
    fold: np.ndarray | None = None


def check_fit_result(method: PostHoc, data: FitData, validation: FitData | None = None) -> None:
    """Warn if a fitted method makes the samples it was fitted on, held-out samples, or those left out of it worse."""
    name = type(method).__name__
    if method.adds and method.wrapped is not None:
        name = f"{type(method.wrapped).__name__} + {method.adds}"
    scales, samples = np.asarray(getattr(method, "scale_", ())), len(data.labels)
    if (scales < 0).any():
        warn(f"{name} reverses the order of the logits of {(scales < 0).sum()} classes (negative scales)")
    learns = method.learns_from_seen and (method.fitted_on_unseen or not method.needs_validation)
    by_heart = method.fitted_on_unseen and method.n_parameters_ > samples
    if by_heart:
        warn(
            f"{name} fits {method.n_parameters_:,} numbers on {samples:,} samples, so it learns them by heart and new "
            "samples become worse; take a method with fewer numbers, such as temperature or HALO"
        )
    if learns or np.unique(scales).size > 1:
        judged = _judged(method, name, data, "samples it was fitted on")
        if judged is not None and _warned(judged, only_order=not learns):
            return
    if not by_heart and (method.fitted_on_unseen or method.needs_features):
        _check_cross_fit(method.wrapped or method, data)
    if validation is not None and not method.fitted_on_unseen and not (learns and validation is data):
        judged = _judged(method, name, validation, "held-out samples")
        if judged is not None:
            _warned(judged)


def _judged(method: PostHoc, name: str, data: FitData, samples: str) -> Judged | None:
    """The logits of evenly spaced samples before and after a fit; None without features that it needs."""
    chosen = rows_checked(data)
    logits, labels = data.rows.read(chosen), data.labels.numpy()[chosen]
    features = None if data.features is None else torch.from_numpy(np.asarray(data.features)[chosen]).float()
    if method.needs_features and features is None:
        return None
    target = np.ones(data.num_classes) if method.log_target_ is None else np.exp(method.log_target_)
    after = method._apply(logits, features).double().numpy()
    return Judged(name, samples, logits.double().numpy(), after, labels, target)


def _check_cross_fit(method: PostHoc, data: FitData) -> None:
    """Judge a method by samples that are left out of its fit."""
    counts, numbers = data.seen_counts, method.n_parameters_
    most, largest = largest_subsample(counts, MAX_CROSS_FIT // numbers), int(counts.max())
    # Methods fitted on held-out samples are right for their class frequencies, which must stay.
    fewest = largest if method.fitted_on_unseen else min(OF_LARGE_CLASS[0], largest)
    if numbers == 1 or most < fewest or (counts > 1).sum() < 2:
        return
    if not method.fitted_on_unseen:
        data = data.subset(subsample_per_class(data.labels.numpy(), min(most, OF_LARGE_CLASS[1]), seed=0))
    folds = stratified_folds(data.labels.numpy(), FEWEST_FOLDS, seed=0, keep_single=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that did not converge: the whole fit has warned
        unseen = out_of_fold_logits(method, data, data, folds)
    left_out, fold = np.concatenate(folds), np.repeat(np.arange(len(folds)), [len(rows) for rows in folds])
    read = (data.rows.read(slice(None)), unseen, calibrated_logits(method, data))
    before, after, fitted = (logits[torch.from_numpy(left_out)].double().numpy() for logits in read)
    target, labels = np.ones(data.num_classes), data.labels.numpy()[left_out]
    judged = Judged(type(method).__name__, LEFT_OUT, before, after, labels, target, fitted, fold)
    _warned(judged, only_order=not method.fitted_on_unseen)


def _warned(judged: Judged, *, only_order: bool = False) -> bool:
    """Warn of a fall of AUC and, unless `only_order`, of accuracy, variety of predictions and likelihood."""
    advice = COMPARE + ("" if "HALO" in judged.name else ", or fit HALO on them (--method halo)")
    name, samples, labels, target = judged.name, judged.samples, judged.labels, judged.target
    weights = (target / np.maximum(np.bincount(labels, minlength=len(target)), 1))[labels]
    # Held-out samples of some classes cannot tell that it is right to expect others more often: only theirs compete.
    present, own = np.unique(labels, return_inverse=True)
    before, after = judged.before[:, present], judged.after[:, present]
    hits = (after.argmax(1) == own).astype(float) - (before.argmax(1) == own)
    # A significant fall is reported as such; samples left out never show one of the AUC if the accuracy rises.
    rises = weights @ hits > 0 if judged.fitted is not None else _falls(-hits, weights)
    order = len(target) == 2 or not rises
    order_message = _auc_message(judged) if order else None
    if order_message is not None:
        warn(f"{name} {order_message}: {advice}")
    if only_order:
        return order_message is not None
    gain = log_likelihoods(after, own) - log_likelihoods(before, own)
    message = None
    if _falls(hits, weights):
        worse = 100 * float(weights @ hits) / weights.sum()
        score = "balanced accuracy" if np.ptp(target) == 0 else "accuracy at the target prior"
        message = f"lowers the {score} of the {samples} by {-worse:.1f} points"
    elif np.ptp(target) == 0:
        message = _one_class(judged.before, judged.after, labels, samples)
    if message is None and _falls(gain, weights) and _falls(gain, np.ones(len(labels))):
        message = f"lowers the likelihood of the {samples}"
    if message is not None:
        warn(f"{name} {message}: {advice}")
    return order_message is not None or message is not None


def _one_class(before: np.ndarray, after: np.ndarray, labels: np.ndarray, samples: str) -> str | None:
    """A message if nearly all predictions become one rare class."""
    balanced = 1 / np.bincount(labels)[labels]
    earlier, predicted = (
        np.bincount(logits.argmax(1), balanced, minlength=logits.shape[1]) / balanced.sum()
        for logits in (before, after)
    )
    most = int(predicted.argmax())
    of_class = float((labels == most).mean())
    if not predicted[most] > ONE_CLASS >= earlier[most] or of_class >= RARE / after.shape[1]:
        return None
    share = 100 * (after.argmax(1) == most).mean()
    return (
        f"predicts column {most} for {share:.1f} % of the {samples}, of which {100 * of_class:.2g} % are of that class"
    )


def _falls(change: np.ndarray, weights: np.ndarray) -> bool:
    """Whether a weighted mean is significantly below 0."""
    return bool(weights @ change < -SIGNIFICANT * np.sqrt(np.square(weights * change).sum()))


def _auc_message(judged: Judged) -> str | None:
    """A message if the mean AUC of pairs of classes falls; None if that is little or not significant.

    Of samples left out of a fit, their difference to the fit that has used them must be significant.
    """
    changes, variances = _auc_changes(judged.before, judged.after, judged.labels, judged.fold)
    if len(changes) == 0:
        return None
    change, error = _mean_and_error(changes, variances)
    pair = "the two classes" if len(judged.target) == 2 else "pairs of classes (mean)"
    lowers = f"lowers the AUC of {pair} by {-change:.3f} on the {judged.samples}"
    if judged.fitted is None:
        return lowers if -change > max(AUC_FALL, SIGNIFICANT * error) else None
    learnt, learnt_error = _mean_and_error(*_auc_changes(judged.fitted, judged.after, judged.labels, judged.fold))
    if -learnt <= LIKELY * learnt_error:
        return None
    if -change > AUC_FALL:
        return lowers
    if -learnt > BY_HEART and change < SIGNIFICANT * error:
        return (
            f"raises the AUC of {pair} by {change - learnt:.3f} on the samples it was fitted on, but not surely on the "
            f"{judged.samples}"
        )
    return None


def _mean_and_error(changes: np.ndarray, variances: np.ndarray) -> tuple[float, float]:
    error = np.sqrt(variances[0]) if len(changes) == 1 else changes.std() / np.sqrt(len(changes))
    return float(changes.mean()), float(error)


def _auc_changes(
    before: np.ndarray, after: np.ndarray, labels: np.ndarray, fold: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(P,) change of the AUC of the difference of two classes' logits, for pairs of classes, and its variance.

    The variance is that of DeLong et al., Comparing the areas under two or more correlated ROC curves, 1988. Samples
    are compared with those of their `fold` (B,).

    >>> right, y = np.eye(2)[[0, 1] * MIN_SAMPLES], np.array([0, 1] * MIN_SAMPLES)
    >>> [values.tolist() for values in _auc_changes(right, 1 - right, y)]
    [[-1.0], [0.0]]
    """
    fold = np.zeros(len(labels), np.int64) if fold is None else fold
    usual = np.flatnonzero(np.bincount(labels, minlength=before.shape[1]) >= MIN_SAMPLES)
    firsts, seconds = (usual[side] for side in np.triu_indices(len(usual), 1))
    changes = []
    for pair in np.linspace(0, len(firsts) - 1, min(len(firsts), MAX_PAIRS)).astype(int):
        first, second = firsts[pair], seconds[pair]
        own = (labels == first) | (labels == second)
        sides: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        for rows in (np.flatnonzero(own & (fold == one)) for one in np.unique(fold)):
            is_first = labels[rows] == first
            if is_first.all() or not is_first.any():
                continue
            margins = (logits[rows, first] - logits[rows, second] for logits in (before, after))
            old, new = (_placements(margin, is_first) for margin in margins)
            for side, of_side in zip(sides, (is_first, ~is_first), strict=True):
                side.append(new[of_side] - old[of_side])
        joined = [np.concatenate(side) for side in sides if side]
        if joined:
            changes.append((joined[0].mean(), sum(side.var(ddof=1) / len(side) for side in joined)))
    means, variances = np.array(changes).reshape(-1, 2).T
    return means, variances


def _placements(margin: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """(B,) share of the samples of the other class that are on the right side of each sample."""
    ranks, below = rankdata(margin), np.empty(len(margin))
    for side in (is_first, ~is_first):
        below[side] = (ranks[side] - rankdata(margin[side])) / (~side).sum()
    return np.where(is_first, below, 1 - below)
