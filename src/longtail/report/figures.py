"""The figures of a report, as PNG, SVG and PDF, and their style: colours, fonts, class names that fit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names

from longtail.files.atomic import replacing, write_bytes
from longtail.metrics.margins import State
from longtail.metrics.scores import Metrics
from longtail.metrics.table import SCORES, SHOTS
from longtail.report.summary import Summary, grouped_confusion
from longtail.tasks.class_distribution import ClassDistribution

BEFORE, AFTER, OTHER, THIRD, COUNTS = "#8a8f98", "#d1495b", "#2e86ab", "#3d7a4f", "#d9dde3"
GAIN = "#3a7d44"
# Fallback fonts for letters that the first font does not have.
ASIAN = [
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    "Droid Sans Fallback",
]
STYLE: dict[Any, Any] = {
    # Only installed fonts: matplotlib warns about each of the others.
    "font.family": ["sans-serif", *sorted({*ASIAN} & {*get_font_names()}, key=ASIAN.index)],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.hashsalt": "longtail",
    "svg.fonttype": "none",
}
LONGEST = 18


@contextmanager
def drawing() -> Iterator[None]:
    """Applies the style while figures are drawn and written."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A letter that no installed font has is drawn as a box; a warning for each letter adds nothing.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


def plain(text: str) -> str:
    """Text in which matplotlib does not read `$` as mathematics.

    >>> plain("$x$")
    '\\\\$x\\\\$'
    """
    return text.replace("$", r"\$")


def short(name: str) -> str:
    """A class name for a figure: the whole name if it fits, otherwise its beginning and its end.

    >>> short("goldfish"), short("great spotted woodpecker 12")
    ('goldfish', 'great spo…ecker 12')
    """
    return plain(name if len(name) <= LONGEST else name[: LONGEST // 2] + "…" + name[1 - LONGEST // 2 :])


def slant(names: list[str], degrees: float) -> dict[str, Any]:
    """Options of tick labels: rotated, unless the names are short enough to fit side by side."""
    return {} if max(map(len, names)) < 3 else {"rotation": degrees, "ha": "right", "rotation_mode": "anchor"}


MOST_IN_LINE = 20  # up to so many classes are joined by a line; with more, the line would be a zigzag
MOST_NAMES = 40  # class names on an axis
MOST_MARKS = 60  # classes that are drawn one by one
# Without dates, so that the same figure is the same file.
UNDATED: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def write_figures(summary: Summary, folder: Path, names: Collection[str] | None = None) -> list[Path]:
    """Draw all figures, or those named, in every format; returns the files."""
    with drawing():
        drawn = {name: FIGURES[name](summary) for name in (FIGURES if names is None else names)}
        return [file for name, figure in drawn.items() for file in save(figure, folder, name)]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """A figure in every format; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    # The layout is computed once; for every format again, it would take longer than the drawing.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    files = []
    for kind, metadata in UNDATED.items():
        drawn = io.BytesIO()  # in memory first: Matplotlib does not clean up after a disk that is full
        figure.savefig(drawn, format=kind, dpi=160, metadata=metadata)
        files.append(write_bytes(folder / f"{name}.{kind}", drawn.getvalue()))
    return files


def _panels(count: int, *, width: float, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = figure.subplots(1, count)
    return figure, list(np.atleast_1d(axes))


def _names(summary: Summary, most: int = MOST_NAMES) -> list[str]:
    """Class names from head to tail, if they are few enough to be readable."""
    return [short(summary.class_names[label]) for label in summary.order] if len(summary.order) <= most else []


def _class_panels(summary: Summary, count: int, width: float) -> tuple[Figure, list[Axes]]:
    """Panels over the classes, wide enough for all names and high enough for the longest one."""
    names = _names(summary)
    longest = max(map(len, names), default=0)
    return _panels(count, width=max(width, 1.4 + 0.2 * len(names)), height=3.0 + 0.05 * longest)


def _behind(axes: Axes, summary: Summary) -> None:
    """Training images per class, as grey bars behind the curves."""
    back = axes.twinx()
    back.bar(range(len(summary.order)), summary.class_counts[summary.order], color=COUNTS, width=0.9, zorder=0)
    back.set_yscale("log")
    back.set_ylabel("training images", color=BEFORE)
    back.tick_params(axis="y", colors=BEFORE)
    back.spines["right"].set_visible(True)
    back.spines["right"].set_color(COUNTS)
    axes.set_zorder(back.get_zorder() + 1)
    axes.patch.set_visible(False)


def _classes(axes: Axes, summary: Summary) -> None:
    if names := _names(summary):
        axes.set_xticks(range(len(names)), names, **slant(names, 45))
    axes.set_xlabel("classes, head → tail")


def _marks(axes: Axes, summary: Summary, values: np.ndarray, color: str, label: str) -> None:
    """A dot for each class; with many classes, faint dots and their running mean."""
    ordered = values[summary.order]
    if len(ordered) <= MOST_MARKS:
        axes.scatter(range(len(ordered)), ordered, color=color, label=label, s=16, zorder=3)
        return
    axes.scatter(range(len(ordered)), ordered, color=color, s=2, alpha=0.3, linewidths=0)
    reach = -(-len(ordered) // MOST_MARKS)
    near = [ordered[max(position - reach, 0) : position + reach + 1] for position in range(len(ordered))]
    means = [float(np.nanmean(window)) if np.isfinite(window).any() else np.nan for window in near]
    axes.plot(means, color=color, label=label, linewidth=1.6)


def _joined(axes: Axes, summary: Summary, before: np.ndarray, after: np.ndarray) -> None:
    """A line from before to after for each class: green if its accuracy rose, red if it fell."""
    low, high = before[summary.order], after[summary.order]
    if len(low) <= MOST_MARKS:
        colors = np.where(high >= low, GAIN, AFTER).tolist()
        axes.vlines(range(len(low)), low, high, colors=colors, linewidth=1.4, alpha=0.6, zorder=2)


def _legend(axes: Axes) -> None:
    """A legend above the panel, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def means_figure(summary: Summary, states: list[tuple[State, str]]) -> Figure:
    """Mean logits and margins of every class, for each state in its colour."""
    figure, panels = _class_panels(summary, 2, width=4.2)
    for axes, name in zip(panels, ("logits", "margins"), strict=True):
        for state, color in states:
            values = getattr(state.means, name)
            label = f"{state.title} (rank correlation {state.correlation[name]:+.2f})"
            _marks(axes, summary, values, color, label)
            if len(values) <= MOST_IN_LINE:
                axes.plot(values[summary.order], color=color, linewidth=1.6)
        _behind(axes, summary)
        _classes(axes, summary)
        axes.set_ylabel(f"mean {name[:-1]}, {summary.split} images")
        _legend(axes)
    return figure


def class_means(summary: Summary) -> Figure:
    return means_figure(summary, [(summary.before, BEFORE), (summary.after, AFTER)])


def _scores(summary: Summary, what: str, score: str, mean: Callable[[Metrics], str]) -> Figure:
    """A score of every class before and after; `mean` gives its mean for the legend."""
    figure, (axes,) = _class_panels(summary, 1, width=6.5)
    shown = ((summary.before, BEFORE), (summary.after, AFTER))
    scores = [np.array(getattr(state.metrics, score), dtype=float) * 100 for state, _ in shown]
    for (state, color), values in zip(shown, scores, strict=True):
        _marks(axes, summary, values, color, f"{state.title}: {mean(state.metrics)}")
    _joined(axes, summary, *scores)
    _behind(axes, summary)
    _classes(axes, summary)
    axes.set_ylabel(f"{what}, {summary.split} images (%)")
    _legend(axes)
    return figure


def class_accuracy(summary: Summary) -> Figure:
    figure = _scores(summary, "accuracy", "per_class", lambda m: f"balanced accuracy {100 * m.balanced:.1f}")
    figure.axes[0].set_ylim(0, 102)
    return figure


def f1_scores(summary: Summary) -> Figure:
    return _scores(summary, "F1", "f1_per_class", lambda m: f"macro F1 {100 * m.macro_f1:.1f}")


def confusion_matrices(summary: Summary) -> Figure:
    matrices = [grouped_confusion(state.metrics, summary.order) for state in (summary.before, summary.after)]
    cells = len(matrices[0][1])
    names = _names(summary, most=cells)
    side = max(2.3, 0.14 * cells) + 0.05 * max(map(len, names), default=0)
    figure, panels = _panels(2, width=side + 1.0, height=side + 0.8)
    for axes, state, (shares, _) in zip(panels, (summary.before, summary.after), matrices, strict=True):
        picture = axes.imshow(100 * shares, cmap="Greys", vmin=0, vmax=100)
        axes.set_title(state.title)
        axes.set_xlabel("predicted class, head → tail")
        axes.set_ylabel("true class, head → tail")
        if names:
            axes.set_xticks(range(cells), names, rotation=0 if max(map(len, names)) < 3 else 90, fontsize=7)
            axes.set_yticks(range(cells), names, fontsize=7)
    figure.colorbar(picture, ax=panels, label=f"% of the true class, {summary.split} images", shrink=0.8)
    return figure


def reliability_diagrams(summary: Summary) -> Figure:
    figure, panels = _panels(2, width=3.4)
    for axes, state, color in zip(panels, (summary.before, summary.after), (BEFORE, AFTER), strict=True):
        share, confidence, accuracy = state.reliability
        axes.plot([0, 1], [0, 1], color=COUNTS, zorder=0)
        # Bars of few images are pale, because their height is uncertain.
        strengths = 0.15 + 0.7 * np.sqrt(share / max(float(share.max()), 1e-9))
        axes.bar(confidence, accuracy, width=0.9 / len(share), color=[(color, strength) for strength in strengths])
        ece, score = state.metrics.ece, SCORES["ece"]
        axes.set_title(f"{state.title}: {score.heading} {score.show(ece)}" if ece is not None else state.title)
        axes.set_xlabel("confidence")
        axes.set_ylabel(f"accuracy, {summary.split} images")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    return figure


def winners_and_losers(summary: Summary) -> Figure:
    figure, (axes,) = _class_panels(summary, 1, width=6.5)
    changes, order = summary.changes, summary.order
    value, low, high = (100 * values[order] for values in (changes.value, changes.low, changes.high))
    positions = np.arange(len(order))
    colors = np.where(low > 0, GAIN, np.where(high < 0, AFTER, BEFORE)).tolist()
    axes.vlines(positions, low, high, colors=colors, linewidth=max(0.4, 60 / len(order) / 10))
    axes.scatter(positions, value, c=colors, s=max(2, 240 / len(order)), zorder=3)
    axes.axhline(0, color=COUNTS, zorder=0)
    _classes(axes, summary)
    axes.set_ylabel(f"change of accuracy (points),\n{summary.split} images")
    return figure


FIGURES: dict[str, Callable[[Summary], Figure]] = {
    "class-means": class_means,
    "class-accuracy": class_accuracy,
    "confusion": confusion_matrices,
    "f1": f1_scores,
    "reliability": reliability_diagrams,
    "winners-and-losers": winners_and_losers,
}


def write_distribution(distribution: ClassDistribution, path: Path) -> None:
    """Training images per class as a PNG file: bars with names if they fit, otherwise a curve over the rank."""
    order, shots = distribution.order, np.array(distribution.shots)[distribution.order]
    counts, positions = distribution.class_counts[order], np.arange(1, len(order) + 1)
    with drawing(), replacing(path) as temporary:
        figure, (axes,) = _panels(1, width=7, height=3.6)
        FigureCanvasAgg(figure)
        for name, color in zip(SHOTS, (OTHER, BEFORE, AFTER), strict=True):
            members = np.flatnonzero(shots == name)
            if len(members):
                # One outline for all classes of a group, because thousands of single bars are slow to draw.
                edges = np.append(positions[members], positions[members[-1]] + 1) - 0.5
                label = f"{name}: {len(members):,} classes"
                axes.stairs(counts[members], edges, fill=True, color=color, label=label)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.set_ylabel("training images")
        imbalance = f"{distribution.imbalance_text}, Gini {distribution.gini:.2f}"
        axes.set_title(f"{plain(Path(distribution.name).name)}: {imbalance}")
        if len(order) <= 30:
            names = [short(distribution.class_names[label]) for label in order]
            axes.set_xticks(positions, names, **slant(names, 60))
        else:
            axes.set_xlabel("class, head to tail")
        figure.legend(loc="outside right upper")
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
