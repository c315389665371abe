"""The numbers of a report: a model before and after calibration, per class, from head to tail.

Pure functions of outputs; figures and page draw their results. All numbers are measured on held-out images, because
the trends are weak on images that the network was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from longtail.metrics.intervals import (
    ClassIntervals,
    Fallen,
    Interval,
    class_differences,
    collapsed_classes,
    fallen_classes,
    images_to_settle,
    paired_difference,
)
from longtail.metrics.margins import State, describe_state
from longtail.metrics.scores import Metrics, evaluate
from longtail.metrics.table import SHOTS
from longtail.outputs.record import Outputs
from longtail.posthoc.costs import cost_change, mean_cost
from longtail.posthoc.limited import STRENGTHS, interpolated


@dataclass(frozen=True)
class Point:
    """Scores at one operating point: a strength of a calibration from 0 to 1."""

    strength: float
    metrics: Metrics
    validation: Metrics | None
    cost: float | None = None
    """Mean cost per image at the training prior, if it is known what mistakes cost."""
    validation_cost: float | None = None


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
        method: the method's name in `longtail methods`.
        strength: share of the way from the unchanged model to the method; see `longtail.posthoc.Limited`.
        validation: (M, K) calibrated logits of the validation samples, if there are any.
        command: the command that makes it, to which `--strength` can be added.
        costs: (K, K) what mistakes cost, if its strength was chosen by costs.
    """

    title: str
    logits: np.ndarray = field(repr=False)
    parameters: int | None = None
    origin: str = ""
    caution: str = ""
    method: str = ""
    strength: float = 1.0
    validation: np.ndarray | None = field(default=None, repr=False)
    command: str = ""
    costs: np.ndarray | None = field(default=None, repr=False)


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
    methods: dict[str, str]
    """Name of the method of every state, by title."""
    points: list[Point]
    """The calibration at several strengths, from the unchanged model on; empty if it leaves the model unchanged."""
    strength: float
    changes: ClassIntervals
    """Accuracy after minus before."""
    gain: Interval
    """Balanced accuracy after minus before."""
    price: Interval
    """Top-1 at the training prior after minus before."""
    cost: tuple[float, Interval] | None
    """Mean cost per image after, and its change, if it is known what mistakes cost."""
    fallen: list[Fallen]
    """The classes whose accuracy fell by more than their interval."""
    confusions: list[Confusion]
    """The most frequent confusions before calibration."""
    new_confusions: list[Confusion]
    """The confusions that grew most."""
    labels: np.ndarray = field(repr=False)

    @property
    def tail(self) -> str | None:
        """The smallest classes: few- or else medium-shot; None if all classes are of one group."""
        groups = [name for name in SHOTS if getattr(self.before.metrics, name) is not None]
        return groups[-1] if len(groups) > 1 else None

    @property
    def sizes(self) -> tuple[int, int]:
        """Held-out images of the class with most, and of the one with fewest."""
        counts = np.unique(self.labels, return_counts=True)[1]
        return int(counts.max()), int(counts.min())

    @property
    def imbalanced(self) -> bool:
        """Whether a class has at least twice as many held-out images as another."""
        most, fewest = self.sizes
        return most >= 2 * fewest


def summarise(held_out: Outputs, validation: Outputs | None, calibrated: Sequence[Calibrated]) -> Summary:
    """Score the classifier as trained, calibrated by the first method, and by the others, on held-out outputs."""
    logits, shown = held_out.rows().read(slice(None)).numpy(), calibrated[0]
    before = describe_state("before", logits, held_out)
    after, *others = (describe_state(one.title, one.logits, held_out, one.parameters) for one in calibrated)
    labels, counts = held_out.labels, held_out.counts_for_groups
    hits_before, hits_after = (state.predictions == labels for state in (before, after))
    shares_before, shares_after = (confusion_shares(state.metrics) for state in (before, after))
    return Summary(
        split=held_out.split,
        class_names=held_out.names,
        class_counts=counts,
        order=np.argsort(-counts, kind="stable"),
        before=before,
        after=after,
        others={state.title: state for state in others},
        methods={"before": "softmax", **{one.title: one.method for one in calibrated}},
        points=strength_points(shown, held_out, validation),
        strength=shown.strength,
        changes=class_differences(hits_after, hits_before, labels, len(counts)),
        gain=paired_difference(hits_after, hits_before, labels),
        price=paired_difference(hits_after, hits_before, labels, counts),
        cost=None
        if shown.costs is None
        else (
            mean_cost(shown.costs, after.predictions, labels, counts),
            cost_change(shown.costs, after.predictions, before.predictions, labels, counts),
        ),
        fallen=fallen_classes(hits_before, hits_after, labels, held_out.names),
        confusions=largest_confusions(shares_before, shares_before, shares_after),
        new_confusions=largest_confusions(shares_after - shares_before, shares_before, shares_after),
        labels=labels,
    )


def verdict(summary: Summary) -> str:
    """What got better, what it costs, and whether to use it."""
    before, after, price = summary.before.metrics, summary.after.metrics, summary.price

    def change(name: str) -> float:
        """The difference of two scores as they are shown, so that all numbers of the page agree."""
        return round(100 * getattr(after, name), 1) - round(100 * getattr(before, name), 1)

    gained = f"balanced accuracy {change('balanced'):+.1f}"
    if summary.tail:
        gained = f"{summary.tail}-shot classes {change(summary.tail):+.1f}, {gained}"
    title, images = summary.after.title, f"{len(summary.labels):,} {summary.split} images"
    large = set(summary.order[: max(len(summary.order) // 3, 1)])
    collapsed = collapsed_classes(summary.fallen, summary.class_names, summary.class_counts)
    paying = [*collapsed, *(one for one in summary.fallen if summary.class_names.index(one.name) in large)]
    falls = f"; class “{paying[0].name}” {100 * paying[0].before:.0f} → {100 * paying[0].after:.0f} %" if paying else ""
    if np.array_equal(summary.before.predictions, summary.after.predictions):
        return f"{title} changes no prediction on {images}: nothing gets better, and nothing worse."
    lost = -change("natural")
    costs = f"costs {lost:.1f} points of top-1 at the training prior" if lost > 0.05 else "costs no top-1"
    if summary.cost is not None:
        saves = (summary.cost[1].high or 0) < 0
        advice = (
            "Use it if mistakes cost what the table says." if saves else "No clear saving: keep the model unchanged."
        )
        cost, saved = summary.cost
        gained = f"cost per image {cost - saved.value:.3g} → {cost:.3g}, {gained}"
        return f"{title}: {gained} points; {costs}{falls}. {advice}"
    if (summary.gain.high or 0) < 0:
        return f"{title} makes the model worse: {gained} points; {costs}{falls}. Keep the model unchanged."
    if (summary.gain.low or 0) <= 0:
        enough = images_to_settle(summary.gain, len(summary.labels))
        advice = f"Keep the model unchanged{f', or measure on about {enough:,} images' if enough else ''}."
        interval = f"[{100 * (summary.gain.low or 0):+.1f}, {100 * (summary.gain.high or 0):+.1f}]"
        gained = f"balanced accuracy {change('balanced'):+.1f} {interval}"
        return f"No clear gain with {title} on {images}: {gained} points; {costs}{falls}. {advice}"
    advice = "Use it if all classes matter equally." if (price.high or 0) < 0 or falls else "Use it."
    if collapsed:
        advice = f"Use it only if class “{collapsed[0].name}” may be lost; otherwise limit the price below."
    return f"{title}: {gained} points; {costs}{falls}. {advice}"


def strength_points(shown: Calibrated, held_out: Outputs, validation: Outputs | None) -> list[Point]:
    """Scores of a calibration at several strengths."""
    if shown.strength == 0:
        return []
    pairs = [(shown.logits, held_out)]
    if validation is not None and shown.validation is not None:
        pairs.append((shown.validation, validation))

    def score(calibrated: np.ndarray, outputs: Outputs, strength: float) -> tuple[Metrics, float | None]:
        logits = outputs.rows().read(slice(None))
        mixed = interpolated(logits, torch.from_numpy(calibrated), strength / shown.strength).numpy()
        cost = None
        if shown.costs is not None:
            cost = mean_cost(shown.costs, mixed.argmax(1), outputs.labels, outputs.counts_for_groups)
        return scores(mixed, outputs), cost

    points = []
    for strength in sorted({*STRENGTHS, shown.strength}):
        (metrics, cost), *more = (score(*pair, strength) for pair in pairs)
        points.append(Point(strength, metrics, more[0][0] if more else None, cost, more[0][1] if more else None))
    return points


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
