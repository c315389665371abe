"""The paper's tables, with our numbers beside the paper's, as Markdown and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtail.methods import POSTHOC_METHODS
from longtail.metrics.intervals import over_seeds
from longtail.metrics.table import SCORES
from longtail.report.paper import AFTER_STAGE_ONE, FORMULAS, NUMBERS, SCORES_SHOWN
from longtail.tasks.table_rows import FAMILIES, Row
from longtail.tasks.tables import show_interval


def lines_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; numbers are aligned right."""
    head = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def in_paper(recipe: str, method: str) -> dict[str, float]:
    """Score → per cent in the paper; empty if the paper has none."""
    numbers = NUMBERS.get(recipe, {}).get(method, ())
    return dict(zip(SCORES_SHOWN[len(numbers)], numbers, strict=True)) if numbers else {}


def shown_scores(recipe: str) -> tuple[str, ...]:
    """The scores that the paper reports for a data set; top-1 if it reports none."""
    return SCORES_SHOWN[max((len(numbers) for numbers in NUMBERS.get(recipe, {}).values()), default=1)]


def accuracy(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """Methods by family; for each recipe and score one column with our number and one with the paper's."""
    scores = [(recipe, score) for recipe in tables for score in shown_scores(recipe)]
    columns = ["Method"]
    for recipe, score in scores:
        columns += [f"{recipe}: {SCORES[score].heading}", "in the paper"]
    known = {recipe: {row.method: row for row in rows} for recipe, rows in tables.items()}
    titles = {row.method: row for rows in tables.values() for row in rows}
    order = list(FAMILIES)
    lines = []
    for method, first in sorted(titles.items(), key=lambda item: order.index(item[1].family)):
        cells = [first.title]
        for recipe, score in scores:
            row = known[recipe].get(method)
            cells += [show_interval(SCORES[score], row.scores[score]) if row else "", _paper(recipe, method, score)]
        lines.append(cells)
    return lines_of(columns, lines)


def _paper(recipe: str, method: str, score: str) -> str:
    numbers = in_paper(recipe, method)
    return f"{numbers[score]:.1f}" if score in numbers else "–"


def trains(label: str) -> str:
    """The numbers that a method of a comparison trains in stage two, by its label.

    >>> trains("marc-solver=sgd"), trains("cbs+marc"), trains("softmax")
    ('2K', '2K', 'network')
    """
    last = label.rpartition("+")[2]
    found = [name for name in POSTHOC_METHODS if last == name or last.startswith(f"{name}-")]
    return POSTHOC_METHODS[max(found, key=len)].trains if found else "network"


def parameters(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """How many numbers each method trains, as a formula and as a number, and its accuracy."""
    columns = ["Method", "trains"]
    for recipe in tables:
        columns += [f"{recipe}: numbers", SCORES["top1"].heading, "in the paper"]
    known = {recipe: {row.method: row for row in rows} for recipe, rows in tables.items()}
    lines = []
    for method in next(iter(known.values())):
        cells = [next(iter(known.values()))[method].title, trains(method)]
        for recipe, rows in known.items():
            row = rows[method]
            numbers = "" if row.parameters is None else f"{row.parameters:,}"
            cells += [numbers, show_interval(SCORES["top1"], row.scores["top1"]), _paper(recipe, method, "top1")]
        lines.append(cells)
    return lines_of(columns, lines)


def stage_one(scores: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """Recipe of stage one → accuracy before and after MARC, seed by seed."""
    columns = ["Stage one on", "Softmax", "after MARC", "in the paper"]
    lines = []
    for recipe, pairs in scores.items():
        before, after = (over_seeds(list(values)) for values in zip(*pairs, strict=True))
        paper = f"{AFTER_STAGE_ONE[recipe]:.1f}" if recipe in AFTER_STAGE_ONE else "–"
        lines.append([recipe, *(show_interval(SCORES["top1"], value) for value in (before, after)), paper])
    return lines_of(columns, lines)


def formulas() -> tuple[list[str], dict[str, Any]]:
    """Table 1, and the class of each method."""
    known = {name: POSTHOC_METHODS[name] for name in FORMULAS}
    rows = [
        [method.title, FORMULAS[name], method.trains, f"`longtail.{method.class_name}`"]
        for name, method in known.items()
    ]
    return lines_of(["Method", "calibrated logit of class j", "trains", "class"], rows), FORMULAS
