"""F1 over data sets in one figure: macro F1 before and after calibration, a pair of bars per data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from longtail.core.files import write_json
from longtail.core.formats import FORMAT
from longtail.core.progress import QUIET, Display
from longtail.core.provenance import provenance
from longtail.metrics.scores import evaluate_logits
from longtail.report.build import opened_run, title_of
from longtail.report.figures import save
from longtail.report.style import AFTER, BEFORE, drawing, plain
from longtail.runs.folder import Run

NAME = "f1-over-data-sets"


@dataclass(frozen=True)
class F1:
    """Macro F1 of runs on one data set, before and after calibration, one value per run (seed)."""

    before: list[float]
    after: list[float]


def draw(scores: Mapping[str, F1]) -> Figure:
    """Bars of the means, one pair per data set; with several runs, one dot per run."""
    figure = Figure(figsize=(max(4.0, 1.2 + 1.3 * len(scores)), 3.2), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(scores))
    for name, shift, color in (("before", -0.19, BEFORE), ("after", 0.19, AFTER)):
        values = [100 * np.array(getattr(score, name)) for score in scores.values()]
        axes.bar(places + shift, [own.mean() for own in values], width=0.36, color=color, label=name)
        for place, own in zip(places, values, strict=True):
            # At the bottom of its bar, where no dot covers it.
            ink = "white" if own.mean() > 8 else "black"
            text = axes.annotate(f"{own.mean():.1f}", (place + shift, 0), (0, 3), textcoords="offset points")
            text.set(ha="center", fontsize=8, color=ink)
            if len(own) > 1:
                axes.scatter(np.full(len(own), place + shift), own, color="black", s=6, zorder=3, linewidths=0)
    axes.set_xticks(places, [plain(name).replace(", ", "\n") for name in scores], fontsize=8)
    axes.set_ylabel("macro F1, held-out images (%)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=2)
    return figure


def write(scores: Mapping[str, F1], folder: Path) -> list[Path]:
    """The figure in every format; returns the files."""
    with drawing():
        return save(draw(scores), folder, NAME)


def f1_of_runs(
    runs: Sequence[Run], out: Path, *, root: str | None = None, workers: int = 0, display: Display = QUIET
) -> dict[str, F1]:
    """Draws the macro F1 of each run before and after its calibration; runs on one data set share a pair of bars."""
    scores: dict[str, F1] = {}
    for run in runs:
        opened = opened_run(run, root=root, workers=workers, display=display)
        held_out, found = opened.held_out, scores.setdefault(title_of(opened.run), F1([], []))
        display.line(f"{opened.run.folder}: {opened.facts['calibration']}")
        before = held_out.rows().read(slice(None)).numpy()
        for values, logits in ((found.before, before), (found.after, opened.after.logits)):
            values.append(evaluate_logits(logits, held_out.labels, held_out.counts_for_groups).macro_f1)
    write(scores, out)
    numbers = {name: vars(score) for name, score in scores.items()}
    write_json(out / f"{NAME}.json", {"format": FORMAT, **provenance(), "macro_f1": numbers})
    return scores
