"""Draws a class distribution to a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longtail.core.files import replacing
from longtail.metrics.table import SHOTS
from longtail.tasks.class_distribution import ClassDistribution


def imbalance_text(found: ClassDistribution) -> str:
    """The imbalance factor, or how many classes have no image."""
    empty = int((found.class_counts == 0).sum())
    if found.imbalance:
        return f"imbalance factor {found.imbalance:.1f}"
    return "1 class without an image" if empty == 1 else f"{empty:,} classes without an image"


def write_plot(found: ClassDistribution, path: Path) -> Path:
    """Images per class as a PNG file: bars with names if they fit, otherwise a curve over the rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from longtail.report.style import AFTER, BEFORE, OTHER, drawing, plain, short, slant

    colours = dict(zip(SHOTS, (OTHER, BEFORE, AFTER), strict=True))
    order, shots = found.order, np.array(found.shots)[found.order]
    counts, places = found.class_counts[order], np.arange(1, len(order) + 1)
    with drawing(), replacing(path) as temporary:
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for name in SHOTS:
            members = np.flatnonzero(shots == name)
            if len(members):
                # One outline for all classes of a group, because thousands of single bars are slow to draw.
                edges = np.append(places[members], places[members[-1]] + 1) - 0.5
                label = f"{name}: {len(members):,} classes"
                axes.stairs(counts[members], edges, fill=True, color=colours[name], label=label)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.set_ylabel("training images")
        axes.set_title(f"{plain(Path(found.name).name)}: {imbalance_text(found)}, Gini {found.gini:.2f}")
        if len(order) <= 30:
            names = [short(found.class_names[label]) for label in order]
            axes.set_xticks(places, names, **slant(names, 60))
        else:
            axes.set_xlabel("class, head to tail")
        figure.legend(loc="outside right upper")
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    return path
