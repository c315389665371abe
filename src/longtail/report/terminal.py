"""Results as tables on a terminal."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from longtail.core.text import percent
from longtail.methods import candidate_title
from longtail.metrics.intervals import Interval, fallen_text
from longtail.metrics.scores import FEW, MANY, Metrics, shot_names
from longtail.metrics.table import SCORES, SHOTS
from longtail.report.distribution import imbalance_text

if TYPE_CHECKING:
    from longtail.posthoc.candidates import Trial
    from longtail.runs.prediction import Predicted
    from longtail.tasks.class_distribution import ClassDistribution
    from longtail.tasks.table_rows import Row

SHOWN_CLASSES = 20
SHOWN_IMAGES = 50
CHART_BARS = 20
BAR_WIDTH = 32
HEADING_WIDTH = 10  # longer headings of numbers take several lines, so that names have the space
EIGHTHS = " ▏▎▍▌▋▊▉"


def metrics_table(
    metrics: Metrics, class_names: list[str], class_counts: np.ndarray, *, split: str = "", every_class: bool = False
) -> Group:
    """The scores, then the classes from head to tail (of many, only the first and last, unless `every_class`)."""
    overall = comparison_table(" ".join(f"{metrics.samples:,} {split} images".split()), {"value": metrics})
    return Group(overall, _class_table(metrics, class_names, class_counts, every_class))


def comparison_table(title: str, rows: dict[str, Metrics]) -> Table:
    """Scores of several models, one column each."""
    table = Table("score", title=title)
    for name in rows:
        table.add_column(name, justify="right")
    for score in SCORES.values():
        table.add_row(score.heading, *(score.show(getattr(metrics, score.name)) for metrics in rows.values()))
    return table


def gain_text(gain: Interval) -> str:
    """A difference in points, with its interval.

    >>> gain_text(Interval(0.021, 0.01, 0.03))
    '+2.1 [+1.0, +3.0]'
    """
    bounds = "" if gain.low is None or gain.high is None else f" [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    return f"{100 * gain.value:+.1f}{bounds}"


# How the method marked with an arrow was chosen: the rule of `Trial.chosen`.
ARROW = (
    "← of the methods clearly better than the unchanged model, the simplest within one standard error of the best "
    "(a higher log-likelihood is better)"
)


def trial_table(trial: Trial) -> Table:
    """The candidates that a method was chosen from."""
    table = Table("method", title="chosen by the log-likelihood of held-out samples at the target prior")
    for heading in ("log-likelihood", "minus the unchanged model", "standard error"):
        table.add_column(heading, justify="right")
    table.caption = ARROW
    chosen = trial.chosen
    for candidate in trial.candidates:
        mark = " ←" if candidate is chosen else ""
        gain, error = trial.difference(candidate, trial.candidates[0])
        table.add_row(
            candidate_title(candidate.name) + mark, f"{trial.mean(candidate):.4f}", f"{gain:+.4f}", f"{error:.4f}"
        )
    return table


def _class_table(metrics: Metrics, class_names: list[str], class_counts: np.ndarray, every_class: bool) -> Table:
    ends = len(class_counts) > SHOWN_CLASSES and not every_class
    caption = "--all shows every class" if ends else None
    table = Table("class", title="classes, head to tail", caption=caption)
    for name in ("training images", "group", "accuracy", "F1"):
        table.add_column(name, justify="right")
    shots = shot_names(class_counts)
    order = np.argsort(-class_counts, kind="stable")
    shown = [*order[: SHOWN_CLASSES // 2], None, *order[-SHOWN_CLASSES // 2 :]] if ends else list(order)
    for label in shown:
        if label is None:
            table.add_row("…", "…", "…", "…", "…")
            continue
        scores = percent(metrics.per_class[label]), percent(metrics.f1_per_class[label])
        table.add_row(escape(class_names[label]), f"{class_counts[label]:,}", shots[label], *scores)
    return table


def prediction_table(found: Predicted, top: int) -> Table:
    """The most probable classes of each image; of many images, only the first."""
    left = len(found) - SHOWN_IMAGES
    caption = f"and {left:,} more: --out FILE.csv writes all" if left > 0 else None
    table = Table(title=f"{len(found):,} images", caption=caption)
    table.add_column("image", overflow="fold")
    best = found.top(top)
    for place in range(1, len(best[0]) + 1):
        table.add_column(f"class {place}" if place > 1 else "class", overflow="fold")
        table.add_column("%", justify="right", no_wrap=True)
    for source, classes in list(zip(found.sources, best, strict=True))[:SHOWN_IMAGES]:
        table.add_row(escape(source), *(cell for name, value in classes for cell in (escape(name), percent(value))))
    return table


def terminal_table(rows: list[Row], caption: str) -> Table:
    """A table that fits on a terminal: the main scores, the price and the difference from Softmax."""
    # Late: a comparison fits methods, whose import takes as long as torch's; other tables do not.
    from longtail.tasks.tables import ranks, show_difference, show_interval

    table = Table(title=caption, box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("method", overflow="fold")
    # Top-1 at the training prior is the price of a calibration; plain top-1 is in the files.
    shown = {name: SCORES[name] for name in (*SHOTS, "balanced", "natural")}
    for heading in (*(score.heading for score in shown.values()), "vs Softmax"):
        table.add_column(fill(heading, HEADING_WIDTH), justify="right", no_wrap=True)
    best = {name: ranks(rows, score) for name, score in shown.items()}
    marks = {0: "[bold]{}[/bold]", 1: "[underline]{}[/underline]"}
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.family != row.family:
            table.add_section()
        cells = []
        for name, score in shown.items():
            interval = row.scores[name]
            mean = Interval(interval.value) if interval and name != "balanced" else interval
            cells.append(marks.get(best[name].get(row.method, 2), "{}").format(show_interval(score, mean)))
        table.add_row(row.title, *cells, escape(show_difference(row.against.get("softmax"))))
    return table


def price_lines(rows: list[Row]) -> list[str]:
    """The classes that each calibration recognises less often, one line per method."""
    fallen = [row for row in rows if row.fallen]
    return [f"{row.title}: recognised less often than before: {fallen_text(row.fallen, most=5)}" for row in fallen]


def bar(value: float, largest: float, width: int = BAR_WIDTH) -> str:
    """A bar of block characters; every value above 0 is visible.

    >>> bar(5, 10, 4), bar(1, 1000, 4), bar(0, 10, 4)
    ('██', '▏', '')
    """
    eighths = round(8 * width * value / max(largest, 1))
    whole, rest = divmod(max(eighths, 1 if value > 0 else 0), 8)
    return "█" * whole + EIGHTHS[rest].strip()


def distribution_table(found: ClassDistribution) -> RenderableType:
    """The classes (of many, only the first and last), a chart, the groups and the measures."""
    many_classes = len(found.class_counts) > SHOWN_CLASSES
    parts = [_sizes_table(found, ends=many_classes)]
    if many_classes:
        parts.append(_chart(found))
    return Group(*parts, _group_table(found), _measures(found))


def _sizes_table(found: ClassDistribution, *, ends: bool) -> Table:
    table = Table(title=f"{found.name}: classes, head to tail")
    table.add_column("class", overflow="ellipsis", no_wrap=True, max_width=40)
    for name in ("images", "share", "group"):
        table.add_column(name, justify="right", no_wrap=True)
    if not ends:
        table.add_column("", no_wrap=True)
    order, counts, shots = found.order.tolist(), found.class_counts.tolist(), found.shots
    half = SHOWN_CLASSES // 2
    for label in [*order[:half], None, *order[-half:]] if ends else order:
        if label is None:
            table.add_row(f"… {len(order) - 2 * half:,} more", "…", "…", "…")
            continue
        row = [escape(found.class_names[label]), f"{counts[label]:,}", _share(counts[label], found.total)]
        table.add_row(*row, shots[label], *([] if ends else [bar(counts[label], max(counts))]))
    table.add_section()
    table.add_row("total", f"{found.total:,}", "100 %", "")
    return table


def _chart(found: ClassDistribution) -> Table:
    """Mean images per class over equal parts of the classes, head to tail."""
    parts = np.array_split(found.class_counts[found.order], min(CHART_BARS, len(found.class_counts)))
    means = [float(part.mean()) for part in parts]
    table = Table("", title=f"mean images per class, in {len(parts)} parts from head to tail", box=None)
    table.add_column("classes", justify="right")
    table.add_column("images", justify="right")
    table.add_column("", no_wrap=True)
    first = 1
    for part, mean in zip(parts, means, strict=True):
        last = first + len(part) - 1
        table.add_row("", f"{first:,}–{last:,}" if last > first else f"{first:,}", f"{mean:,.1f}", bar(mean, means[0]))
        first = last + 1
    return table


def _group_table(found: ClassDistribution) -> Table:
    table = Table("group", title="groups")
    for name in ("training images", "classes", "images", "share"):
        table.add_column(name, justify="right")
    limits = (f"more than {MANY}", f"{FEW} to {MANY}", f"fewer than {FEW}")
    for name, limit in zip(SHOTS, limits, strict=True):
        classes, images = found.group(name)
        table.add_row(name, limit, f"{classes:,}", f"{images:,}", _share(images, found.total))
    return table


def _measures(found: ClassDistribution) -> str:
    counts = found.class_counts
    sizes = ", ".join(f"{size:,} {split}" for split, size in found.images.items())
    return (
        f"{found.found or f'{len(counts):,} classes; images: {sizes}'}\n"
        f"largest class {counts.max():,}, median {np.median(counts):g}, smallest {counts.min():,}\n"
        f"{imbalance_text(found)}; Gini coefficient {found.gini:.2f}"
    )


def _share(part: int, total: int) -> str:
    return f"{100 * part / max(total, 1):.2f} %"
