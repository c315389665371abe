"""The numbers of a report: a model before and after calibration, per class, from head to tail.

Pure functions of outputs; figures and page draw their results. All numbers are measured on held-out images, because
the trends are weak on images that the network was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from longtail.metrics.intervals import ClassIntervals, class_differences
from longtail.metrics.margins import State, describe_state
from longtail.metrics.scores import Metrics, evaluate
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc


@dataclass(frozen=True)
class Point:
    """Scores at one operating point.

    `setting` is a gamma of MARC, or HALO's target prior as a power of the training prior (1 as in training, 0 uniform).
    """

    setting: float
    metrics: Metrics
    validation: Metrics | None


@dataclass(frozen=True)
class Confusion:
    """A true class, the class predicted instead, how often before and after, and the accuracy of the true class."""

    truth: int
    predicted: int
    before: float
    after: float
    accuracy_before: float
    accuracy_after: float


@dataclass(frozen=True)
class Calibrated:
    """A calibration in a report.

    Args:
        title: name of the method.
        logits: (N, K) calibrated logits of the held-out samples.
        parameters: how many numbers the method trained.
        origin: how and on what it was fitted, in words.
        caution: why its scores are higher than on new images; empty if they are not.
        targets: its scores at other target priors, if it has one.
    """

    title: str
    logits: np.ndarray = field(repr=False)
    parameters: int | None = None
    origin: str = ""
    caution: str = ""
    targets: Sequence[Point] = ()


@dataclass(frozen=True)
class Summary:
    """Everything a report shows."""

    split: str
    class_names: tuple[str, ...]
    class_counts: np.ndarray
    order: np.ndarray
    """Classes from head to tail."""
    before: State
    after: State
    others: dict[str, State]
    gammas: list[Point]
    """MARC at several gammas."""
    targets: list[Point]
    """HALO at several target priors, from training to beyond uniform; empty if the model was not calibrated with it."""
    changes: ClassIntervals
    """Accuracy after minus before."""
    confusions: list[Confusion]
    """The most frequent confusions before calibration."""
    new_confusions: list[Confusion]
    """The confusions that grew most."""
    labels: np.ndarray = field(repr=False)


def summarise(
    held_out: Outputs,
    validation: Outputs | None,
    calibrated: Sequence[Calibrated],
    gammas: Mapping[float, PostHoc],
) -> Summary:
    """Score the classifier as trained, calibrated by the first method, and by the others, on held-out outputs."""
    before = describe_state("before", held_out.rows().read(slice(None)).numpy(), held_out)
    after, *others = (describe_state(one.title, one.logits, held_out, one.parameters) for one in calibrated)
    correct_before, correct_after = (state.predictions == held_out.labels for state in (before, after))
    shares_before, shares_after = (confusion_shares(state.metrics) for state in (before, after))
    return Summary(
        split=held_out.split,
        class_names=held_out.names,
        class_counts=held_out.counts_for_groups,
        order=np.argsort(-held_out.counts_for_groups, kind="stable"),
        before=before,
        after=after,
        others={state.title: state for state in others},
        gammas=[_gamma_point(gamma, method, held_out, validation) for gamma, method in gammas.items()],
        targets=list(next((one.targets for one in calibrated if one.targets), ())),
        changes=class_differences(correct_after, correct_before, held_out.labels, len(before.metrics.per_class)),
        confusions=largest_confusions(shares_before, shares_before, shares_after),
        new_confusions=largest_confusions(shares_after - shares_before, shares_before, shares_after),
        labels=held_out.labels,
    )


def _gamma_point(gamma: float, method: PostHoc, held_out: Outputs, validation: Outputs | None) -> Point:
    metrics = [scores(np.asarray(method.transform(outputs)), outputs) for outputs in (held_out, validation) if outputs]
    return Point(gamma, metrics[0], metrics[1] if validation else None)


def scores(logits: np.ndarray, outputs: Outputs) -> Metrics:
    """The scores of logits (N, K) on the labels of outputs."""
    return evaluate(logits, outputs.labels, outputs.counts_for_groups)


def largest_confusions(values: np.ndarray, before: np.ndarray, after: np.ndarray, count: int = 8) -> list[Confusion]:
    """The pairs of different classes with the largest positive values (K, K), and their shares before and after."""
    off_diagonal = values.copy()
    np.fill_diagonal(off_diagonal, -1)
    largest = np.argsort(-off_diagonal, axis=None, kind="stable")[:count]
    pairs = zip(*np.unravel_index(largest, off_diagonal.shape), strict=True)
    return [
        Confusion(int(i), int(j), *(float(shares[i, column]) for column in (j, i) for shares in (before, after)))
        for i, j in pairs
        if off_diagonal[i, j] > 0
    ]


def confusion_shares(metrics: Metrics) -> np.ndarray:
    """The confusion matrix (K, K) as shares of the true class."""
    matrix = metrics.matrix()
    return np.asarray(matrix / np.maximum(matrix.sum(1, keepdims=True), 1))


def grouped_confusion(metrics: Metrics, order: np.ndarray, most: int = 50) -> tuple[np.ndarray, list[slice]]:
    """Shares (G, G) of the confusion matrix, classes from head to tail; with many classes, neighbours are merged."""
    shares = confusion_shares(metrics)[np.ix_(order, order)]
    edges = np.linspace(0, len(order), min(most, len(order)) + 1).round().astype(int)
    groups = [slice(a, b) for a, b in pairwise(edges)]
    rows = np.stack([shares[group].mean(0) for group in groups])
    return np.stack([rows[:, group].sum(1) for group in groups], axis=1), groups
