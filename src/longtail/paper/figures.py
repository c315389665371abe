"""Figures of the paper that a report does not have: F1 on several data sets, DisAlign beside MARC, gamma."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from longtail.metrics.scores import Metrics
from longtail.metrics.table import SCORES, SHOTS
from longtail.report.figures import AFTER, BEFORE, OTHER, THIRD, means_figure, plain
from longtail.report.summary import Summary


def disalign_beside_marc(summary: Summary) -> Figure:
    """Mean logits and margins as trained, and after DisAlign, MARC and, if it was fitted, HALO."""
    states = {summary.after.title: summary.after, **summary.others}
    shown = [(summary.before, BEFORE), (states["DisAlign"], OTHER), (states["MARC"], AFTER)]
    return means_figure(summary, shown + ([(states["HALO"], THIRD)] if "HALO" in states else []))


def accuracy_against_gamma(scores: Mapping[float, Metrics]) -> Figure:
    """Gamma → scores of MARC on test images: balanced accuracy and that of many-, medium- and few-shot classes."""
    figure = Figure(figsize=(5, 3.0), layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(("balanced", *SHOTS), (AFTER, "#5b8c5a", "#e9a23b", OTHER), strict=True))
    for name, color in colors.items():
        values = [getattr(metrics, name) for metrics in scores.values()]
        if None not in values:
            label, width = SCORES[name].heading.lower(), 2.2 if name == "balanced" else 1.4
            axes.plot([*scores], 100 * np.array(values, dtype=float), color=color, label=label, linewidth=width)
    axes.axvline(1.2, color=BEFORE, linewidth=0.8, linestyle=":", zorder=0, label="the paper's 1.2")
    axes.set_xlabel("gamma: strength of the class weights")
    axes.set_ylabel("accuracy, test images (%)")
    axes.legend(
        ncols=5, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, columnspacing=0.8, handlelength=1.2
    )
    return figure


def f1_over_data_sets(scores: Mapping[str, Mapping[str, list[float]]]) -> Figure:
    """Data set → before, after → macro F1 per seed: bars of the means, one pair per data set, and a dot per seed."""
    figure = Figure(figsize=(max(4.0, 1.2 + 1.3 * len(scores)), 3.2), layout="constrained")
    axes = figure.subplots()
    positions = np.arange(len(scores))
    for state, shift, color in (("before", -0.19, BEFORE), ("after", 0.19, AFTER)):
        values = [100 * np.array(one[state]) for one in scores.values()]
        axes.bar(positions + shift, [seeds.mean() for seeds in values], width=0.36, color=color, label=state)
        for position, seeds in zip(positions + shift, values, strict=True):
            # At the bottom of its bar, where no dot covers it.
            text = axes.annotate(f"{seeds.mean():.1f}", (position, 0), (0, 3), textcoords="offset points")
            text.set(ha="center", fontsize=8, color="white" if seeds.mean() > 8 else "black")
            if len(seeds) > 1:
                axes.scatter(np.full(len(seeds), position), seeds, color="black", s=6, zorder=3, linewidths=0)
    axes.set_xticks(positions, [plain(name).replace(", ", "\n") for name in scores], fontsize=8)
    axes.set_ylabel("macro F1, held-out images (%)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=2)
    return figure
