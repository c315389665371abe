"""The numbers of a report: a model before and after calibration, per class, from head to tail.

Pure functions of stored outputs; figures and page draw their results. All numbers are measured on
held-out images, because the trends are weak on images that the network was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from longtail.errors import UserError
from longtail.metrics.intervals import ClassIntervals, class_differences
from longtail.metrics.scores import Metrics, evaluate_logits
from longtail.metrics.state import State, describe_state
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.fitting import fit_outputs
from longtail.posthoc.halo import HALO
from longtail.posthoc.marc import MARC

# Powers of the training prior: as in training, uniform, and beyond.
TARGETS = tuple(round(1 - 0.1 * place, 1) for place in range(16))


@dataclass(frozen=True)
class Point:
    """One operating point: MARC at one gamma."""

    gamma: float
    metrics: Metrics
    validation: Metrics | None


@dataclass(frozen=True)
class TargetPoint:
    """One target prior: HALO at a power of the training prior (1 as in training, 0 uniform)."""

    power: float
    metrics: Metrics
    validation: Metrics


@dataclass(frozen=True)
class Confusion:
    """A true class, the class predicted instead, how often before and after, and the accuracy of the true class."""

    truth: int
    taken_for: int
    before: float
    after: float
    accuracy_before: float
    accuracy_after: float


@dataclass(frozen=True)
class Calibrated:
    """The calibration of a report: the calibrated logits (N, K) of the held-out samples.

    Args:
        title: name of the method, with the settings that were chosen.
        method: its name for commands.
        logits: (N, K).
        parameters: how many numbers it trained.
    """

    title: str
    method: str
    logits: np.ndarray = field(repr=False)
    parameters: int | None = None


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
    points: list[Point]
    targets: list[TargetPoint]
    """HALO at several target priors, from training to beyond uniform; empty without validation images."""
    changes: ClassIntervals
    """Accuracy after minus before."""
    confusions: list[Confusion]
    """The most frequent confusions before calibration."""
    new_confusions: list[Confusion]
    """Grown most."""
    labels: np.ndarray = field(repr=False)


def operating_points(train: Outputs, held_out: Outputs, validation: Outputs | None) -> list[Point]:
    """MARC at every gamma of the grid; each solve starts from the solutions of other gammas."""
    points = []
    for gamma, method in MARC().fit_path(train).items():
        metrics = [
            None
            if outputs is None
            else evaluate_logits(_apply(method, outputs), outputs.labels, outputs.counts_for_groups)
            for outputs in (held_out, validation)
        ]
        assert metrics[0] is not None
        points.append(Point(gamma, metrics[0], metrics[1]))
    return points


def target_points(train: Outputs, held_out: Outputs, validation: Outputs) -> list[TargetPoint]:
    """HALO, fitted once, at every target prior of the grid."""
    halo = HALO()
    try:
        fit_outputs(halo, train, validation)
    except UserError:
        return []  # the validation images have too few classes; the rest of the report does not need them
    points = []
    for power in TARGETS:
        own = halo.with_target_prior(power)
        scores = [
            evaluate_logits(_apply(own, outputs), outputs.labels, outputs.counts_for_groups)
            for outputs in (held_out, validation)
        ]
        points.append(TargetPoint(power, *scores))
    return points


def _apply(method: PostHoc, outputs: Outputs) -> np.ndarray:
    return np.asarray(method.transform(outputs))


def class_changes(before: State, after: State, labels: np.ndarray) -> ClassIntervals:
    """The classes whose accuracy rises or falls most."""
    hits = [state.predictions == labels for state in (after, before)]
    return class_differences(hits[0], hits[1], labels, len(before.metrics.per_class))


def worst_confusions(before: Metrics, after: Metrics, count: int = 8) -> list[Confusion]:
    """The pairs of classes that are confused most often before calibration, as shares of the true class."""
    shares = [_shares(metrics.matrix()) for metrics in (before, after)]
    return _largest(shares[0], shares, count)


def new_confusions(before: Metrics, after: Metrics, count: int = 8) -> list[Confusion]:
    """The pairs of classes that are confused more often after calibration than before."""
    shares = [_shares(metrics.matrix()) for metrics in (before, after)]
    return _largest(shares[1] - shares[0], shares, count)


def _largest(values: np.ndarray, shares: list[np.ndarray], count: int) -> list[Confusion]:
    """The pairs of different classes with the largest positive values (K, K)."""
    off_diagonal = values.copy()
    np.fill_diagonal(off_diagonal, -1)
    largest = np.argsort(-off_diagonal, axis=None, kind="stable")[:count]
    pairs = zip(*np.unravel_index(largest, off_diagonal.shape), strict=True)
    return [
        Confusion(int(i), int(j), *(float(share[i, place]) for place in (j, i) for share in shares))
        for i, j in pairs
        if off_diagonal[i, j] > 0
    ]


def _shares(confusion: np.ndarray) -> np.ndarray:
    return confusion / np.maximum(confusion.sum(1, keepdims=True), 1)


def grouped_confusion(metrics: Metrics, order: np.ndarray, most: int = 50) -> tuple[np.ndarray, list[slice]]:
    """Shares (G, G) of the confusion matrix, classes from head to tail; with many classes, neighbours are merged."""
    shares = _shares(metrics.matrix())[np.ix_(order, order)]
    edges = np.linspace(0, len(order), min(most, len(order)) + 1).round().astype(int)
    groups = [slice(a, b) for a, b in pairwise(edges)]
    rows = np.stack([shares[group].mean(0) for group in groups])
    return np.stack([rows[:, group].sum(1) for group in groups], axis=1), groups


def fitted(
    method: PostHoc, title: str, name: str, train: Outputs, held_out: Outputs, validation: Outputs | None
) -> Calibrated:
    """A method, fitted now, as a `Calibrated` of the report."""
    fit_outputs(method, train, validation)
    return Calibrated(title, name, _apply(method, held_out), method.n_parameters_)


def summarise(
    train: Outputs, held_out: Outputs, *, validation: Outputs | None, after: Calibrated, others: list[Calibrated]
) -> Summary:
    """Score the classifier as trained, calibrated, and by other methods on held-out outputs."""
    before = describe_state("before", held_out.rows().read(slice(None)).numpy(), held_out)
    states = {
        known.title: describe_state(known.title, known.logits, held_out, known.parameters) for known in (after, *others)
    }
    calibrated = states.pop(after.title)
    return Summary(
        split=held_out.split,
        class_names=held_out.names,
        class_counts=held_out.counts_for_groups,
        order=np.argsort(-held_out.counts_for_groups, kind="stable"),
        before=before,
        after=calibrated,
        others=states,
        points=operating_points(train, held_out, validation),
        targets=[] if validation is None else target_points(train, held_out, validation),
        changes=class_changes(before, calibrated, held_out.labels),
        confusions=worst_confusions(before.metrics, calibrated.metrics),
        new_confusions=new_confusions(before.metrics, calibrated.metrics),
        labels=held_out.labels,
    )
