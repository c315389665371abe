"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from longtail.files.text import percent
from longtail.metrics.intervals import Interval, fallen_text, show_difference
from longtail.metrics.scores import SHOT_LIMITS, Metrics, shot_names
from longtail.metrics.table import BINARY_SCORES, SCORES, SHOTS

if TYPE_CHECKING:
    from longtail.runs.prediction import Predicted
    from longtail.tasks.class_distribution import ClassDistribution
    from longtail.tasks.tables import Row

SHOWN_CLASSES = 20
SHOWN_IMAGES = 50
CHART_BARS = 20
BAR_WIDTH = 32
PATH_WIDTH, NAME_WIDTH = 26, 10  # columns that the path of an image, and the name of a class, have at least
HEADING_WIDTH = 10  # longer headings of numbers take several lines, so that names have the space


def numbers_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
    """A table of text in its first column, and numbers in the others."""
    table = Table(headings[0], title=title, caption=caption or None)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap="\n" in heading)
    for row in rows:
        table.add_row(*row)
    return table


def metrics_table(
    metrics: Metrics, class_names: list[str], class_counts: np.ndarray, *, split: str = "", every_class: bool = False
) -> Group:
    """The scores, then the classes from head to tail (of many, only the first and last, unless `every_class`)."""
    overall = comparison_table(" ".join(f"{metrics.samples:,} {split} images".split()), {"value": metrics})
    shots, labels = shot_names(class_counts), _shown_labels(class_counts, every_class)
    rows = [
        (
            escape(class_names[label]),
            f"{class_counts[label]:,}",
            shots[label],
            percent(metrics.per_class[label]),
            percent(metrics.f1_per_class[label]),
        )
        if label is not None
        else ["…"] * 5
        for label in labels
    ]
    headings = ("class", "training images", "group", "accuracy", "F1")
    hint = "--all shows every class" if None in labels else ""
    return Group(overall, numbers_table("classes, head to tail", headings, rows, hint))


def _shown_labels(class_counts: np.ndarray, every_class: bool = False) -> list[int | None]:
    """Classes from head to tail; of many, only the first and last, with None between them."""
    order, half = np.argsort(-class_counts, kind="stable").tolist(), SHOWN_CLASSES // 2
    return order if every_class or len(order) <= SHOWN_CLASSES else [*order[:half], None, *order[-half:]]


def comparison_table(title: str, rows: dict[str, Metrics]) -> Table:
    """Scores of several models, one column each."""
    binary = BINARY_SCORES if all(metrics.roc_auc is not None for metrics in rows.values()) else {}
    scores = (*SCORES.values(), *binary.values())
    shown = ((one.heading, *(one.show(getattr(metrics, one.name)) for metrics in rows.values())) for one in scores)
    return numbers_table(title, ("score", *rows), shown)


def prediction_table(predicted: Predicted, top: int, width: int = 80) -> Table:
    """The most probable classes of each image, one line per image; of many images, only the first."""
    best = predicted.top(top)
    # A name is followed by a space, and a probability takes 6 columns.
    sets = predicted.set_names()
    classes = 1 if sets else min(len(best[0]), max(1, (width - PATH_WIDTH) // (NAME_WIDTH + 7)))
    images = list(zip(predicted.sources, best, strict=True))[:SHOWN_IMAGES]
    longest = max(len(name) for _, row in images for name, _ in [*row[:classes], ("class 2", 0.0)])
    name_width = NAME_WIDTH + 6 if sets else max(min(longest, (width - PATH_WIDTH) // classes - 7), 1)
    path_width = PATH_WIDTH if sets else max(width - 1 - classes * (name_width + 7), 1)
    paths = [shortened(source, path_width) for source, _ in images]
    set_width = max(width - max(map(len, paths), default=0) - min(longest, name_width) - 9, 1)
    more = [f"{len(predicted) - SHOWN_IMAGES:,} more images"] if len(predicted) > SHOWN_IMAGES else []
    more += [f"{len(best[0]) - classes} more classes"] if len(best[0]) > classes else []
    caption = f"and {' and '.join(more)}: --out FILE.csv writes all" if more else None
    table = Table(title=f"{len(predicted):,} images", caption=caption, box=None, padding=(0, 1, 0, 0))
    table.add_column("image", no_wrap=True, max_width=path_width)
    for rank in range(1, classes + 1):
        table.add_column(f"class {rank}" if rank > 1 else "class", no_wrap=True, max_width=name_width)
        table.add_column("%", justify="right", no_wrap=True)
    if sets:  # after the most probable class, the classes of the set as far as they fit
        table.add_column("set", no_wrap=True)
    for index, (path, (_, row)) in enumerate(zip(paths, images, strict=True)):
        cells = [cell for name, value in row[:classes] for cell in (escape(name), percent(value))]
        members = f"{len(sets[index])}: {', '.join(sets[index])}" if sets else ""
        cells += [escape(members if len(members) <= set_width else f"{members[: set_width - 1]}…")] if sets else []
        table.add_row(escape(path), *cells)
    return table


def shortened(path: str, width: int) -> str:
    """A path without its middle; the file name stays whole if it fits.

    >>> shortened("photos/2024/summer/holidays/beach-0012.jpg", 24)
    'photos/…/beach-0012.jpg'
    >>> shortened("photos/2024/summer/holidays/beach-0012.jpg", 20)
    '…/beach-0012.jpg'
    >>> shortened("photos/a-very-long-name-of-an-image.jpg", 20)
    'photos/…an-image.jpg'
    """
    if len(path) <= width:
        return path
    first, name = path.split("/", 1)[0], path.rsplit("/", 1)[-1]
    for text in (f"{first}/…/{name}", f"…/{name}"):
        if len(text) <= width:
            return text
    start = path[: width // 3 + 1]
    return f"{start}…{path[len(start) + 1 - width :]}"


def terminal_table(rows: list[Row], caption: str) -> Table:
    """A table that fits on a terminal: the main scores, the price and the difference from Softmax."""
    # Late: a comparison fits methods, whose import takes as long as torch's; other tables do not.
    from longtail.tasks.tables import ranks, show_interval

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


def bar(value: float, largest: float) -> Bar:
    """A bar of block characters; every value above 0 is visible."""
    return Bar(largest, 0, max(value, largest / (8 * BAR_WIDTH)) if value > 0 else 0, width=BAR_WIDTH)


def distribution_table(distribution: ClassDistribution) -> RenderableType:
    """The classes (of many, only the first and last), a chart, the groups and the measures."""
    groups = ((name, *distribution.group(name)) for name in SHOTS)
    rows = [
        (name, SHOT_LIMITS[name], f"{classes:,}", f"{images:,}", _share(images, distribution.total))
        for name, classes, images in groups
    ]
    sizes = numbers_table("groups", ("group", "training images", "classes", "images", "share"), rows)
    charts = [_chart(distribution)] if len(distribution.class_counts) > SHOWN_CLASSES else []
    return Group(_sizes_table(distribution), *charts, sizes, _measures(distribution))


def _sizes_table(distribution: ClassDistribution) -> Table:
    table = Table(title=f"{distribution.name}: classes, head to tail")
    table.add_column("class", overflow="ellipsis", no_wrap=True, max_width=40)
    for name in ("images", "share", "group"):
        table.add_column(name, justify="right", no_wrap=True)
    counts, shots = distribution.class_counts.tolist(), distribution.shots
    labels = _shown_labels(distribution.class_counts)
    if None not in labels:
        table.add_column("", no_wrap=True)
    for label in labels:
        if label is None:
            table.add_row(f"… {len(counts) - SHOWN_CLASSES:,} more", "…", "…", "…")
            continue
        row = [escape(distribution.class_names[label]), f"{counts[label]:,}", _share(counts[label], distribution.total)]
        table.add_row(*row, shots[label], *([] if None in labels else [bar(counts[label], max(counts))]))
    table.add_section()
    table.add_row("total", f"{distribution.total:,}", "100 %", "")
    return table


def _chart(distribution: ClassDistribution) -> Table:
    """Mean images per class over equal groups of the classes, head to tail."""
    groups = np.array_split(distribution.class_counts[distribution.order], CHART_BARS)
    means = [float(group.mean()) for group in groups]
    table = Table("", title=f"mean images per class, in {len(groups)} groups from head to tail", box=None)
    table.add_column("classes", justify="right")
    table.add_column("images", justify="right")
    table.add_column("", no_wrap=True)
    first = 1
    for group, mean in zip(groups, means, strict=True):
        last = first + len(group) - 1
        table.add_row("", f"{first:,}–{last:,}" if last > first else f"{first:,}", f"{mean:,.1f}", bar(mean, means[0]))
        first = last + 1
    return table


def _measures(distribution: ClassDistribution) -> str:
    counts = distribution.class_counts
    sizes = ", ".join(f"{size:,} {split}" for split, size in distribution.images.items())
    return (
        f"{distribution.source or f'{len(counts):,} classes; images: {sizes}'}\n"
        f"largest class {counts.max():,}, median {np.median(counts):g}, smallest {counts.min():,}\n"
        f"{distribution.imbalance_text}; Gini coefficient {distribution.gini:.2f}"
    )


def _share(count: int, total: int) -> str:
    return f"{100 * count / max(total, 1):.2f} %"
