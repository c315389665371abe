"""The results of a comparison as rows, one per method, and as tables: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longtail.errors import UserError
from longtail.files.atomic import write_json, write_text
from longtail.files.records import FORMAT, provenance
from longtail.files.text import csv_text, markdown_text
from longtail.metrics.intervals import (
    FEWEST_SEEDS,
    Fallen,
    Interval,
    fallen_classes,
    fallen_text,
    over_seeds,
    paired_difference,
    show_difference,
)
from longtail.metrics.table import MAIN_SCORES, SCORES, Score
from longtail.tasks.cells import BASE, Result, read_predictions

FAMILIES = {
    "standard": "Standard training",
    "re-sampling": "Data re-sampling",
    "loss": "Loss function engineering",
    "decision boundary": "Decision boundary adjustment",
    "confidence": "Confidence calibration",
    "network": "Others",
    "own": "Own methods",
}
# Method → heading of the column with the differences from it.
REFERENCES = {"softmax": "vs Softmax", "marc": "vs MARC"}


@dataclass(frozen=True)
class Row:
    """One method: its scores over seeds, and its difference from the references on the same test samples.

    Args:
        method: name for files; `title` is its name in tables.
        stage_one: method that trained the network; itself, or the one it calibrates.
        scores: mean over the seeds with its interval, by score; `values` has the value of each seed.
        against: difference of balanced accuracy from each reference, and from the stage-one method it calibrates.
        differences: the difference of each seed.
        steps: optimiser steps of stage one; `images` are those that it has seen.
        parameters: numbers that stage two trains.
        chosen: settings chosen on validation images, per seed.
        fallen: a calibration's price: classes that it recognises less often than the network it calibrates, over seeds.
    """

    method: str
    title: str
    family: str
    stage_one: str
    seeds: list[int]
    scores: dict[str, Interval | None]
    values: dict[str, list[float | None]]
    against: dict[str, Interval]
    differences: dict[str, list[float]]
    steps: int
    images: int
    parameters: int | None
    chosen: dict[str, list[float]]
    fallen: list[Fallen] = field(default_factory=list)


def summarise(results: Sequence[Result], cells: Path) -> list[Row]:
    """Rows of the table, by family; `cells` is the folder with the predictions."""
    if not results:
        raise UserError("there are no results to summarise")
    _require_comparable(results)
    correct: dict[str, dict[int, np.ndarray]] = {}
    labels = np.zeros(0)
    for result in results:
        file = cells / f"{result['method']}-seed{result['seed']}.npz"
        predictions, truth = read_predictions(file, len(result["class_counts"]))
        if len(labels) and not np.array_equal(truth, labels):
            raise UserError(f"{file} has other test images than the cells before it; delete it, and run this again")
        labels = truth
        correct.setdefault(result["method"], {})[result["seed"]] = predictions == labels
    rows = [_row([one for one in results if one["method"] == method], correct, labels) for method in correct]
    return sorted(rows, key=lambda row: ([*FAMILIES].index(row.family), row.method.startswith("marc")))


def _row(results: Sequence[Result], correct: dict[str, dict[int, np.ndarray]], labels: np.ndarray) -> Row:
    """The row of one method, from its results with every seed; `correct` is method → seed → (N,) correct or not."""
    first, method = results[0], results[0]["method"]
    seeds = [result["seed"] for result in results]
    values: dict[str, list[Any]] = {name: [result["metrics"].get(name) for result in results] for name in SCORES}
    # Cells of earlier versions have no names of classes.
    labelled = [str(label) for label in range(len(first["class_counts"]))]
    classes = next(filter(None, (result["class_names"] for result in results)), labelled)
    hits = np.stack([correct[method][seed] for seed in seeds])
    against, differences, fallen = {}, {}, []
    for reference in dict.fromkeys([*REFERENCES, first["stage_one"]]):
        if reference == method or not set(seeds) <= set(correct.get(reference, {})):
            continue
        other = np.stack([correct[reference][seed] for seed in seeds])
        against[reference] = paired_difference(hits, other, labels)
        pairs = zip(hits, other, strict=True)
        differences[reference] = [paired_difference(one, two, labels).value for one, two in pairs]
        if reference == first["stage_one"]:
            fallen = fallen_classes(other.mean(0), hits.mean(0), labels, classes)
    names = ("method", "title", "family", "stage_one", "steps", "images", "parameters")
    shared: dict[str, Any] = {name: value for name, value in first.items() if name in names}
    chosen = set.intersection(*(set(result["chosen"]) for result in results))
    return Row(
        **shared,
        seeds=seeds,
        scores={name: None if None in numbers else over_seeds(numbers) for name, numbers in values.items()},
        values=values,
        against=against,
        differences=differences,
        chosen={name: [result["chosen"][name] for result in results] for name in first["chosen"] if name in chosen},
        fallen=fallen,
    )


def _require_comparable(results: Sequence[Result]) -> None:
    """One data set, the same images, and for each stage-one method and seed one network."""
    data = set()
    for result in results:
        config = result["identity"]["config"]
        classes = len(result["class_counts"])
        data.add((f"{config['data']} x {config['imbalance']:g}", config["profile"], classes))
    if len(data) > 1:
        names = ", ".join(sorted({name for name, *_ in data}))
        raise UserError(f"results of different data sets cannot be in one table: {names}")
    first: dict[tuple[object, ...], tuple[str, str]] = {}
    for result in results:
        method, seed = result["method"], result["seed"]
        other, model = first.setdefault((result["stage_one"], seed), (method, result["model"]))
        if model != result["model"]:
            raise UserError(
                f"{other} and {method} of seed {seed} belong to different networks: stage one was trained again in "
                "between; remove the cells of one of them and compare again"
            )
        for split, digest in result["identity"].get("images", {}).items():
            # The test images are the same for every seed; each seed has another long tail and other validation images.
            other, images = first.setdefault((split, seed) if split != "test" else (split,), (method, digest))
            if images != digest:
                raise UserError(
                    f"{other} and {method} of seed {seed} were made on different {split} images; run the comparison "
                    "again, which computes one of them anew"
                )


def write_tables(rows: list[Row], results: Sequence[Result], folder: Path, caption: str) -> list[Path]:
    """Write results.csv (tidy), results.json, table.md and table.tex, with their provenance."""
    origin = {**provenance(), "seeds": ", ".join(str(seed) for seed in sorted({row["seed"] for row in results}))}
    footer = "\n" + "".join(f"- {name}: {value}\n" for name, value in origin.items())
    return [
        write_text(folder / "results.csv", tidy_csv(results)),
        write_json(
            folder / "results.json", {"format": FORMAT, "caption": caption, **origin, "rows": [*map(asdict, rows)]}
        ),
        write_text(folder / "table.md", markdown(rows, caption) + footer),
        write_text(folder / "table.tex", latex(rows, caption)),
    ]


def tidy_csv(results: Sequence[Result]) -> str:
    """One line per method, seed and score; cells of earlier versions have fewer scores."""
    rows = (
        (result["method"], result["family"], result["seed"], name, result["metrics"].get(name))
        for result in results
        for name in SCORES
    )
    return csv_text(["method", "family", "seed", "score", "value"], rows)


def ranks(rows: list[Row], score: Score) -> dict[str, int]:
    """Method → 0 for the best, 1 for the second best number as shown."""
    values = {
        row.method: round(score.scaled(interval.value), score.digits)
        for row in rows
        if (interval := row.scores[score.name]) is not None
    }
    best = sorted(set(values.values()), reverse=not score.lower_is_better)[:2]
    return {method: best.index(value) for method, value in values.items() if value in best}


def show_interval(score: Score, interval: Interval | None, plus_minus: str = "±") -> str:
    """`80.7 ± 0.4`, or only the value if there is no interval."""
    if interval is None:
        return score.show(None)
    half = interval.half_width
    return score.show(interval.value) + ("" if half is None else f" {plus_minus} {score.show(half)}")


def _score_cells(rows: list[Row], names: Iterable[str], marks: tuple[str, str], plus_minus: str) -> list[list[str]]:
    """The scores of every row as text; `marks` are the formats of the best and the second best number of a score."""
    formats = [*marks, "{}"]
    best = {name: ranks(rows, SCORES[name]) for name in names}
    return [
        [
            formats[best[name].get(row.method, 2)].format(show_interval(SCORES[name], row.scores[name], plus_minus))
            for name in best
        ]
        for row in rows
    ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; all columns but the first are aligned right."""
    head = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def markdown(rows: list[Row], caption: str) -> str:
    """A Markdown table: families as in the paper, best bold, second underlined; then the values of each seed."""
    on_top = any(row.stage_one not in (BASE.label, row.method) for row in rows)
    columns = ["Method", *(score.heading for score in SCORES.values()), *REFERENCES.values()]
    columns += [*(["vs its stage one"] if on_top else []), "Steps", "Images seen", "Stage two"]
    rule = "|---|" + "---:|" * (len(columns) - 2) + "---|"
    lines = [markdown_text(caption), "", "| " + " | ".join(columns) + " |", rule]
    family = None
    for row, cells in zip(rows, _score_cells(rows, SCORES, ("**{}**", "<u>{}</u>"), "±"), strict=True):
        if row.family != family:
            family = row.family
            lines.append(f"| *{FAMILIES[family]}* |" + " |" * (len(columns) - 1))
        cells += [show_difference(row.against.get(reference)) for reference in REFERENCES]
        cells += [show_difference(row.against.get(row.stage_one))] if on_top else []
        stage_two = [] if row.parameters is None else [f"{row.parameters:,} numbers"]
        stage_two += [f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in row.chosen.items()]
        cells += [f"{row.steps:,}", f"{row.images:,}", "; ".join(stage_two)]
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
    spread, reasons = "one seed" if seeds == 1 else f"{seeds} seeds: mean", "over test images only"
    if seeds >= FEWEST_SEEDS:
        spread, reasons = f"mean ± 95 % interval over {seeds} seeds (Student's)", "over seeds and test images"
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
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _escape(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(words.get(letter, rf"\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
