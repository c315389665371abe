"""The numbers behind a report: what a model does before and after repair, per class, head to tail.

Pure functions of stored outputs; figures and page draw what they return. Everything is about
held-out images: on images a network was trained on, the trends are weak.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from longtail.metrics.intervals import CONFIDENCE, class_differences
from longtail.metrics.scores import Metrics, evaluate_logits
from longtail.metrics.state import State, describe_state
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc
from longtail.posthoc.marc import MARC


@dataclass(frozen=True)
class Point:
    """One operating point: MARC at one gamma."""

    gamma: float
    metrics: Metrics
    validation: Metrics | None


@dataclass(frozen=True)
class Changes:
    """Accuracy after minus before per class (K,), with 95 % paired bootstrap bounds; NaN where a class is absent."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Confusion:
    """True class, what it is taken for, and how often before and after."""

    truth: int
    taken_for: int
    before: float
    after: float


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
    changes: Changes
    confusions: list[Confusion]
    labels: np.ndarray = field(repr=False)


def operating_points(train: Outputs, held_out: Outputs, validation: Outputs | None) -> list[Point]:
    """MARC at every gamma of the grid, each solved from the last one's answer."""
    points = []
    for gamma, method in MARC().fit_path(train).items():
        metrics = [
            None if outputs is None else evaluate_logits(_apply(method, outputs), outputs.labels, outputs.class_counts)
            for outputs in (held_out, validation)
        ]
        assert metrics[0] is not None
        points.append(Point(gamma, metrics[0], metrics[1]))
    return points


def _apply(method: PostHoc, outputs: Outputs) -> np.ndarray:
    return np.asarray(method.transform(outputs))


def class_changes(before: State, after: State, labels: np.ndarray) -> Changes:
    """Which classes win and which lose."""
    drawn, present = class_differences(after.predictions == labels, before.predictions == labels, labels)
    low, high = np.quantile(drawn[1:], [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=0)
    columns = []
    for values in (drawn[0], low, high):
        full = np.full(len(before.metrics.per_class), np.nan)
        full[present] = values
        columns.append(full)
    return Changes(*columns)


def worst_confusions(before: Metrics, after: Metrics, count: int = 8) -> list[Confusion]:
    """The pairs of classes that are mixed up most often before, as shares of the true class."""
    shares = [_shares(metrics.matrix()) for metrics in (before, after)]
    off_diagonal = shares[0].copy()
    np.fill_diagonal(off_diagonal, -1)
    largest = np.argsort(-off_diagonal, axis=None, kind="stable")[:count]
    found = []
    for i, j in zip(*np.unravel_index(largest, off_diagonal.shape), strict=True):
        if shares[0][i, j] > 0:
            found.append(Confusion(int(i), int(j), float(shares[0][i, j]), float(shares[1][i, j])))
    return found


def _shares(confusion: np.ndarray) -> np.ndarray:
    return confusion / np.maximum(confusion.sum(1, keepdims=True), 1)


def grouped_confusion(metrics: Metrics, order: np.ndarray, most: int = 50) -> tuple[np.ndarray, list[slice]]:
    """Shares (G, G) of the confusion matrix, classes head to tail, neighbours put together if they are many."""
    shares = _shares(metrics.matrix())[np.ix_(order, order)]
    edges = np.linspace(0, len(order), min(most, len(order)) + 1).round().astype(int)
    groups = [slice(a, b) for a, b in pairwise(edges)]
    rows = np.stack([shares[group].mean(0) for group in groups])
    return np.stack([rows[:, group].sum(1) for group in groups], axis=1), groups


def summarise(train: Outputs, held_out: Outputs, *, validation: Outputs | None, others: dict[str, PostHoc]) -> Summary:
    """Fit MARC and the other methods on the training outputs; score all on held-out ones."""
    marc = MARC().fit(train, validation=validation)
    before = describe_state("before", held_out.rows().read(slice(None)).numpy(), held_out)
    after = describe_state("MARC", _apply(marc, held_out), held_out, marc.n_parameters_)
    states = {}
    for name, method in others.items():
        fitted = method.fit(train, validation=validation)
        states[name] = describe_state(name, _apply(fitted, held_out), held_out, fitted.n_parameters_)
    names = held_out.class_names or tuple(str(label) for label in range(held_out.num_classes))
    return Summary(
        split=held_out.split,
        class_names=names,
        class_counts=held_out.class_counts,
        order=np.argsort(-held_out.class_counts, kind="stable"),
        before=before,
        after=after,
        others=states,
        points=operating_points(train, held_out, validation),
        changes=class_changes(before, after, held_out.labels),
        confusions=worst_confusions(before.metrics, after.metrics),
        labels=held_out.labels,
    )
