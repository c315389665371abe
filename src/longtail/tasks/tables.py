"""The rows of a comparison as tables: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from longtail.files.atomic import write_json, write_text
from longtail.files.provenance import provenance
from longtail.files.records import FORMAT
from longtail.files.text import markdown_text, table_cell
from longtail.metrics.intervals import FEWEST_SEEDS, Interval, fallen_text, show_difference
from longtail.metrics.table import MAIN_SCORES, SCORES, Score
from longtail.tasks.cells import Result
from longtail.tasks.entries import BASE
from longtail.tasks.rows import FAMILIES, REFERENCES, Row

VS_STAGE_ONE = "vs its stage one"  # heading for methods on top of another network than Softmax's


def write_tables(rows: list[Row], results: Sequence[Result], folder: Path, caption: str) -> list[Path]:
    """Write results.csv (tidy), results.json, table.md and table.tex, with their provenance."""
    summary = [asdict(row) for row in rows]
    origin = {**provenance(), "seeds": ", ".join(str(seed) for seed in sorted({row["seed"] for row in results}))}
    footer = "\n" + "".join(f"- {name}: {value}\n" for name, value in origin.items())
    return [
        write_text(folder / "results.csv", tidy_csv(results)),
        write_json(folder / "results.json", {"format": FORMAT, "caption": caption, **origin, "rows": summary}),
        write_text(folder / "table.md", markdown(rows, caption) + footer),
        write_text(folder / "table.tex", latex(rows, caption)),
    ]


def tidy_csv(results: Sequence[Result]) -> str:
    """One line per method, seed and score."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "family", "seed", "score", "value"])
    for result in results:
        for name in SCORES:
            value = result["metrics"].get(name)  # cells of earlier versions have fewer scores
            shown = "" if value is None else value
            writer.writerow([table_cell(result["method"]), result["family"], result["seed"], name, shown])
    return text.getvalue()


def ranks(rows: list[Row], score: Score) -> dict[str, int]:
    """Method → 0 for the best, 1 for the second best number as shown."""
    values = {
        row.method: round(score.scaled(interval.value), score.digits)
        for row in rows
        if (interval := row.scores[score.name]) is not None
    }
    best = sorted(set(values.values()), reverse=not score.lower_is_better)[:2]
    return {method: best.index(value) for method, value in values.items() if value in best}


def show_interval(score: Score, interval: Interval | None, *, plus_minus: str = "±") -> str:
    """`80.7 ± 0.4`, or only the value if there is no interval."""
    if interval is None:
        return score.show(None)
    half = interval.half_width
    return score.show(interval.value) + ("" if half is None else f" {plus_minus} {score.show(half)}")


def _score_cells(rows: list[Row], names: Iterable[str], marks: tuple[str, str], plus_minus: str) -> list[list[str]]:
    """The scores of every row as text; `marks` are the formats of the best and the second best number of a score."""
    formats = dict(enumerate(marks))
    best = {name: ranks(rows, SCORES[name]) for name in names}
    return [
        [
            formats.get(best[name].get(row.method, len(marks)), "{}").format(
                show_interval(SCORES[name], row.scores[name], plus_minus=plus_minus)
            )
            for name in best
        ]
        for row in rows
    ]


def _settings(row: Row) -> str:
    """Trained numbers and chosen settings of stage two."""
    settings = [] if row.parameters is None else [f"{row.parameters:,} numbers"]
    settings += [f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in row.chosen.items()]
    return "; ".join(settings)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; all columns but the first are aligned right."""
    head = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(rows: list[Row], caption: str) -> str:
    """A Markdown table: families as in the paper, best bold, second underlined; then the values of each seed."""
    on_top = any(row.stage_one not in (BASE.label, row.method) for row in rows)
    columns = ["Method", *(score.heading for score in SCORES.values()), *REFERENCES.values()]
    columns += [VS_STAGE_ONE] if on_top else []
    columns += ["Steps", "Images seen", "Stage two"]
    rule = "|---|" + "---:|" * (len(columns) - 2) + "---|"
    lines = [markdown_text(caption), "", "| " + " | ".join(columns) + " |", rule]
    family = None
    for row, cells in zip(rows, _score_cells(rows, SCORES, ("**{}**", "<u>{}</u>"), "±"), strict=True):
        if row.family != family:
            family = row.family
            lines.append(f"| *{FAMILIES[family]}* |" + " |" * (len(columns) - 1))
        cells += [show_difference(row.against.get(reference)) for reference in REFERENCES]
        cells += [show_difference(row.against.get(row.stage_one))] if on_top else []
        cells += [f"{row.steps:,}", f"{row.images:,}", _settings(row)]
        lines.append("| " + " | ".join([markdown_text(row.title), *cells]) + " |")
    lines += ["", *notes(rows), "", *_seed_values(rows)]
    fallen = [f"- {markdown_text(row.title)}: {markdown_text(fallen_text(row.fallen))}" for row in rows if row.fallen]
    if fallen:
        lines += ["", "Recognised less often than before, by more than their interval:", "", *fallen]
    return "\n".join(lines) + "\n"


def notes(rows: list[Row]) -> list[str]:
    """How to read the table."""
    seeds = len(rows[0].seeds)
    lower = [score.heading for score in SCORES.values() if score.lower_is_better]
    plain = [score.heading for score in SCORES.values() if not score.in_percent]
    spread = f"mean ± 95 % interval over {seeds} seeds (Student's)" if seeds >= FEWEST_SEEDS else f"{seeds} seeds: mean"
    spread = "one seed" if seeds == 1 else spread
    reasons = "over seeds and test images" if seeds >= FEWEST_SEEDS else "over test images only"
    budget = "the same number of optimiser steps" if len({row.steps for row in rows}) == 1 else "the steps shown"
    return [
        f"Per cent (but {', '.join(plain)}); {spread}. “vs” is the difference of balanced accuracy on the same test "
        f"images, with its 95 % interval {reasons}. Best **bold**, second <u>underlined</u> (lowest for "
        f"{', '.join(lower)}).",
        "",
        f"Stage-one methods take {budget}, each with a full batch per stream of images: methods with several "
        "streams see more images. The column of stage two: how many numbers it trains, and the settings chosen on "
        "validation images, one per seed.",
    ]


def _seed_values(rows: list[Row]) -> list[str]:
    """Balanced accuracy and its differences, seed by seed."""
    if len(rows[0].seeds) < 2:
        return []
    balanced = SCORES["balanced"]
    heading = f"{balanced.heading}, seeds {', '.join(map(str, rows[0].seeds))}"
    lines = [f"| Method | {heading} | {' | '.join(REFERENCES.values())} |", "|---|---|" + "---|" * len(REFERENCES)]
    for row in rows:
        values = ", ".join(balanced.show(value) for value in row.values["balanced"])
        others = [", ".join(f"{100 * value:+.1f}" for value in row.differences.get(name, ())) for name in REFERENCES]
        lines.append(f"| {markdown_text(row.title)} | {values} | {' | '.join(others)} |")
    return lines


def latex(rows: list[Row], caption: str) -> str:
    """A booktabs table in the paper's layout."""
    headings = [SCORES[name].heading for name in MAIN_SCORES]
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape(caption)}}}",
        rf"\begin{{tabular}}{{l{'c' * len(headings)}}}",
        r"\toprule",
        " & ".join(["Method", *headings]) + r" \\",
    ]
    family, marks = None, (r"\textbf{{{}}}", r"\underline{{{}}}")
    for row, cells in zip(rows, _score_cells(rows, MAIN_SCORES, marks, r"$\pm$"), strict=True):
        if row.family != family:
            family = row.family
            title = rf"\multicolumn{{{len(headings) + 1}}}{{l}}{{\emph{{{FAMILIES[family]}}}}} \\"
            lines += [r"\midrule", title]
        lines.append(" & ".join([_escape(row.title), *cells]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(words.get(letter, rf"\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
