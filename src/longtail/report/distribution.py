"""Drawing a class distribution: a table and bars for the terminal, a figure for a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from longtail.files import replacing
from longtail.metrics import FEW, MANY, SHOTS
from longtail.profiling import Profile

SHOWN_CLASSES = 20
CHART_BARS = 20
BAR_WIDTH = 32
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(value: float, largest: float, width: int = BAR_WIDTH) -> str:
    """A bar of block characters; anything above 0 can be seen.

    >>> bar(5, 10, 4), bar(1, 1000, 4), bar(0, 10, 4)
    ('██', '▏', '')
    """
    eighths = round(8 * width * value / max(largest, 1))
    whole, rest = divmod(max(eighths, 1 if value > 0 else 0), 8)
    return "█" * whole + EIGHTHS[rest].strip()


def distribution(profile: Profile) -> RenderableType:
    """Everything: the classes (the ends only, if they are many), a chart, the groups, the measures."""
    many_classes = len(profile.class_counts) > SHOWN_CLASSES
    parts = [_class_table(profile, ends=many_classes)]
    if many_classes:
        parts.append(_chart(profile))
    return Group(*parts, _group_table(profile), _measures(profile))


def _class_table(profile: Profile, *, ends: bool) -> Table:
    table = Table(title=f"{profile.name}: classes, head to tail")
    table.add_column("class", overflow="ellipsis", no_wrap=True, max_width=40)
    for name in ("images", "share", "group"):
        table.add_column(name, justify="right", no_wrap=True)
    if not ends:
        table.add_column("", no_wrap=True)
    order, counts, shots = profile.order.tolist(), profile.class_counts, profile.shots
    half = SHOWN_CLASSES // 2
    for label in [*order[:half], None, *order[-half:]] if ends else order:
        if label is None:
            table.add_row(f"… {len(order) - 2 * half:,} more", "…", "…", "…")
            continue
        row = [escape(profile.class_names[label]), f"{counts[label]:,}", _share(counts[label], profile.total)]
        table.add_row(*row, shots[label], *([] if ends else [bar(counts[label], counts.max())]))
    table.add_section()
    table.add_row("total", f"{profile.total:,}", "100 %", "")
    return table


def _chart(profile: Profile) -> Table:
    """Mean images per class over equal parts of the classes, head to tail."""
    parts = np.array_split(profile.class_counts[profile.order], min(CHART_BARS, len(profile.class_counts)))
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


def _group_table(profile: Profile) -> Table:
    table = Table("group", title="groups")
    for name in ("training images", "classes", "images", "share"):
        table.add_column(name, justify="right")
    limits = (f"more than {MANY}", f"{FEW} to {MANY}", f"fewer than {FEW}")
    for name, limit in zip(SHOTS, limits, strict=True):
        classes, images = profile.group(name)
        table.add_row(name, limit, f"{classes:,}", f"{images:,}", _share(images, profile.total))
    return table


def _measures(profile: Profile) -> str:
    counts = profile.class_counts
    sizes = ", ".join(f"{size:,} {split}" for split, size in profile.images.items())
    return (
        f"{len(counts):,} classes; images: {sizes}\n"
        f"largest class {counts.max():,}, median {np.median(counts):g}, smallest {counts.min():,}\n"
        f"{_factor(profile)}; Gini coefficient {profile.gini:.2f}"
    )


def _factor(profile: Profile) -> str:
    empty = int((profile.class_counts == 0).sum())
    return f"imbalance factor {profile.imbalance:.1f}" if profile.imbalance else f"{empty:,} classes without an image"


def _share(part: int, total: int) -> str:
    return f"{100 * part / max(total, 1):.2f} %"


def write_plot(profile: Profile, path: Path) -> Path:
    """Images per class as a PNG file: bars with names where they fit, else a curve over the rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from longtail.report.style import AFTER, BEFORE, OTHER, drawing, plain, short, slant

    colours = dict(zip(SHOTS, (OTHER, BEFORE, AFTER), strict=True))
    order, shots = profile.order, np.array(profile.shots)[profile.order]
    counts, places = profile.class_counts[order], np.arange(1, len(order) + 1)
    with drawing(), replacing(path) as temporary:
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for name in SHOTS:
            members = np.flatnonzero(shots == name)
            if len(members):
                # One outline for all classes of a group: thousands of bars are drawn as quickly as ten.
                edges = np.append(places[members], places[members[-1]] + 1) - 0.5
                label = f"{name}: {len(members):,} classes"
                axes.stairs(counts[members], edges, fill=True, color=colours[name], label=label)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.set_ylabel("training images")
        axes.set_title(f"{plain(Path(profile.name).name)}: {_factor(profile)}, Gini {profile.gini:.2f}")
        if len(order) <= 30:
            names = [short(profile.class_names[label]) for label in order]
            axes.set_xticks(places, names, **slant(names, 60))
        else:
            axes.set_xlabel("class, head to tail")
        figure.legend(loc="outside right upper")
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    return path
