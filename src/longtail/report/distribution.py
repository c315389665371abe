"""The plot of a class distribution, and the optional packages that reports and figures need."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from longtail.errors import UserError
from longtail.files.atomic import replacing
from longtail.metrics.table import SHOTS
from longtail.tasks.class_distribution import ClassDistribution

DRAWING = ("matplotlib",)
PAGE = (*DRAWING, "jinja2", "plotly")


def require(what: str, packages: tuple[str, ...]) -> None:
    """Raises before any work is done if one of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'longtail[report]'")


def imbalance_text(distribution: ClassDistribution) -> str:
    """The imbalance factor, or how many classes have no image."""
    empty = int((distribution.class_counts == 0).sum())
    if distribution.imbalance:
        return f"imbalance factor {distribution.imbalance:.1f}"
    return "1 class without an image" if empty == 1 else f"{empty:,} classes without an image"


def write_plot(distribution: ClassDistribution, path: Path) -> Path:
    """Images per class as a PNG file: bars with names if they fit, otherwise a curve over the rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from longtail.report.figures import AFTER, BEFORE, OTHER, drawing, plain, short, slant

    colours = dict(zip(SHOTS, (OTHER, BEFORE, AFTER), strict=True))
    order, shots = distribution.order, np.array(distribution.shots)[distribution.order]
    counts, positions = distribution.class_counts[order], np.arange(1, len(order) + 1)
    with drawing(), replacing(path) as temporary:
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for name in SHOTS:
            members = np.flatnonzero(shots == name)
            if len(members):
                # One outline for all classes of a group, because thousands of single bars are slow to draw.
                edges = np.append(positions[members], positions[members[-1]] + 1) - 0.5
                label = f"{name}: {len(members):,} classes"
                axes.stairs(counts[members], edges, fill=True, color=colours[name], label=label)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        axes.set_ylabel("training images")
        axes.set_title(
            f"{plain(Path(distribution.name).name)}: {imbalance_text(distribution)}, Gini {distribution.gini:.2f}"
        )
        if len(order) <= 30:
            names = [short(distribution.class_names[label]) for label in order]
            axes.set_xticks(positions, names, **slant(names, 60))
        else:
            axes.set_xlabel("class, head to tail")
        figure.legend(loc="outside right upper")
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    return path
