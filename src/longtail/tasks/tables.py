"""The results of a comparison as tables: tidy CSV, JSON, Markdown and LaTeX in the paper's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from longtail.core.files import write_json, write_text
from longtail.core.formats import FORMAT
from longtail.core.provenance import provenance
from longtail.core.text import markdown_text, table_cell
from longtail.errors import UserError
from longtail.metrics.intervals import FEWEST_SEEDS, Interval, over_seeds, paired_difference
from longtail.metrics.table import MAIN_SCORES, SCORES, Score
from longtail.tasks.cells import Result, read_predictions
from longtail.tasks.entries import BASE

FAMILIES = {
    "standard": "Standard training",
    "re-sampling": "Data re-sampling",
    "loss": "Loss function engineering",
    "decision boundary": "Decision boundary adjustment",
    "confidence": "Confidence calibration",
    "network": "Others",
    "own": "Own methods",
}
# Method → what the column of differences from it is called.
REFERENCES = {"softmax": "vs Softmax", "marc": "vs MARC"}
VS_STAGE_ONE = "vs its stage one"  # the same for methods on top of another network than Softmax's


@dataclass(frozen=True)
class Row:
    """One method: its scores over seeds, and its difference from the references on the same test samples.

    Args:
        method: name for files.
        title: name in tables.
        family: kind of method.
        stage_one: method that trained the network; itself, or the one it calibrates.
        seeds: which.
        scores: mean over the seeds with its interval, by score.
        values: the seeds' own values, by score.
        against: difference of balanced accuracy from each reference, and from the stage-one method it calibrates.
        differences: the seeds' own differences.
        steps: optimiser steps of stage one.
        images: images that stage one has seen.
        parameters: numbers that stage two trains.
        chosen: settings chosen on validation images, per seed.
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


def summarise(results: Sequence[Result], cells: Path) -> list[Row]:
    """Rows of the table, by family; `cells` is the folder with the predictions."""
    if not results:
        raise UserError("there are no results to summarise")
    _require_one_data_set(results)
    _require_one_network(results)
    correct: dict[str, dict[int, np.ndarray]] = {}
    labels = np.zeros(0)
    for result in results:
        file = cells / f"{result['method']}-seed{result['seed']}.npz"
        predictions, truth = read_predictions(file, len(result["class_counts"]))
        if len(labels) and not np.array_equal(truth, labels):
            raise UserError(f"{file} is of other test images than the cells before it; delete it, and run this again")
        labels = truth
        correct.setdefault(result["method"], {})[result["seed"]] = predictions == labels
    rows = [_row([own for own in results if own["method"] == method], correct, labels) for method in correct]
    order = list(FAMILIES)
    return sorted(rows, key=lambda row: order.index(row.family) + (0.5 if row.method.startswith("marc") else 0))


def _row(own: Sequence[Result], correct: dict[str, dict[int, np.ndarray]], labels: np.ndarray) -> Row:
    first, method = own[0], own[0]["method"]
    values = {name: [result["metrics"].get(name) for result in own] for name in SCORES}
    hits = np.stack([correct[method][result["seed"]] for result in own])
    against, differences = {}, {}
    for reference in dict.fromkeys([*REFERENCES, first["stage_one"]]):
        theirs = correct.get(reference, {})
        if reference == method or not all(result["seed"] in theirs for result in own):
            continue
        other = np.stack([theirs[result["seed"]] for result in own])
        against[reference] = paired_difference(hits, other, labels)
        pairs = zip(hits, other, strict=True)
        differences[reference] = [paired_difference(one, two, labels).value for one, two in pairs]
    return Row(
        method=method,
        title=first["title"],
        family=first["family"],
        stage_one=first["stage_one"],
        seeds=[result["seed"] for result in own],
        scores={name: _over_seeds(known) for name, known in values.items()},
        values=values,
        against=against,
        differences=differences,
        steps=first["steps"],
        images=first["images"],
        parameters=first["parameters"],
        chosen={name: [result["chosen"][name] for result in own] for name in first["chosen"] if _all_chose(own, name)},
    )


def _all_chose(own: Sequence[Result], name: str) -> bool:
    return all(name in result["chosen"] for result in own)


def _over_seeds(values: list[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return over_seeds(known) if len(known) == len(values) else None


def _require_one_data_set(results: Sequence[Result]) -> None:
    def data(result: Result) -> tuple[object, ...]:
        config = result["identity"]["config"]
        return config["data"], config["profile"], config["imbalance"], len(result["class_counts"])

    if len({data(result) for result in results}) > 1:
        found = sorted({f"{data(result)[0]} x {data(result)[2]:g}" for result in results})
        raise UserError(f"results of different data sets do not go into one table: {', '.join(found)}")


def _require_one_network(results: Sequence[Result]) -> None:
    """Post-hoc methods on one stage-one method and seed are compared on one network."""
    known: dict[tuple[str, int], Result] = {}
    for result in results:
        first = known.setdefault((result["stage_one"], result["seed"]), result)
        if first["model"] != result["model"]:
            raise UserError(
                f"{first['method']} and {result['method']} of seed {result['seed']} are of different networks: stage "
                "one was trained again in between; remove the cells of one of them and compare again"
            )


def write_tables(rows: list[Row], results: Sequence[Result], folder: Path, caption: str) -> list[Path]:
    """results.csv (tidy), results.json, table.md and table.tex; with where they come from."""
    summary = [asdict(row) for row in rows]
    origin = {**provenance(), "seeds": ", ".join(str(seed) for seed in sorted({row["seed"] for row in results}))}
    beside = "\n" + "".join(f"- {name}: {value}\n" for name, value in origin.items())
    return [
        write_text(folder / "results.csv", tidy_csv(results)),
        write_json(folder / "results.json", {"format": FORMAT, "caption": caption, **origin, "rows": summary}),
        write_text(folder / "table.md", markdown(rows, caption) + beside),
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
    known = {
        row.method: round(score.scaled(interval.value), score.digits)
        for row in rows
        if (interval := row.scores[score.name]) is not None
    }
    best = sorted(set(known.values()), reverse=not score.lower_is_better)[:2]
    return {method: best.index(value) for method, value in known.items() if value in best}


def show_interval(score: Score, interval: Interval | None, *, plus_minus: str = "±") -> str:
    """`80.7 ± 0.4`, or the value alone where there is no interval."""
    if interval is None:
        return score.show(None)
    half = interval.half_width
    return score.show(interval.value) + ("" if half is None else f" {plus_minus} {score.show(half)}")


def show_difference(interval: Interval | None) -> str:
    """`+1.2 [-0.2, +2.6]`, in points."""
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{100 * interval.value:+.1f}"
    return f"{100 * interval.value:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def _settings(row: Row) -> str:
    """Trained numbers and chosen settings of stage two."""
    parts = [] if row.parameters is None else [f"{row.parameters:,} numbers"]
    parts += [f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in row.chosen.items()]
    return "; ".join(parts)


def markdown(rows: list[Row], caption: str) -> str:
    """Families as in the paper; best bold, second underlined; below, the seeds' own values."""
    on_top = any(row.stage_one not in (BASE.label, row.method) for row in rows)
    columns = ["Method", *(score.heading for score in SCORES.values()), *REFERENCES.values()]
    columns += [VS_STAGE_ONE] if on_top else []
    columns += ["Steps", "Images seen", "Stage two"]
    rule = "|---|" + "---:|" * (len(columns) - 2) + "---|"
    lines = [markdown_text(caption), "", "| " + " | ".join(columns) + " |", rule]
    best = {name: ranks(rows, score) for name, score in SCORES.items()}
    marks = {0: "**{}**", 1: "<u>{}</u>"}
    family = None
    for row in rows:
        if row.family != family:
            family = row.family
            lines.append(f"| *{FAMILIES[family]}* |" + " |" * (len(columns) - 1))
        cells = [
            marks.get(best[name].get(row.method, 2), "{}").format(show_interval(score, row.scores[name]))
            for name, score in SCORES.items()
        ]
        cells += [show_difference(row.against.get(reference)) for reference in REFERENCES]
        cells += [show_difference(row.against.get(row.stage_one))] if on_top else []
        cells += [f"{row.steps:,}", f"{row.images:,}", _settings(row)]
        lines.append("| " + " | ".join([markdown_text(row.title), *cells]) + " |")
    return "\n".join([*lines, "", *notes(rows), "", *_seed_values(rows)]) + "\n"


def notes(rows: list[Row]) -> list[str]:
    """How to read the table."""
    seeds = len(rows[0].seeds)
    lower = [score.heading for score in SCORES.values() if score.lower_is_better]
    plain = [score.heading for score in SCORES.values() if not score.in_percent]
    spread = f"mean ± 95 % interval over {seeds} seeds (Student's)" if seeds >= FEWEST_SEEDS else f"{seeds} seeds: mean"
    spread = "one seed" if seeds == 1 else spread
    reasons = "over seeds and test images" if seeds >= FEWEST_SEEDS else "over test images alone"
    budget = "the same number of optimiser steps" if len({row.steps for row in rows}) == 1 else "the steps shown"
    return [
        f"Per cent (but {', '.join(plain)}); {spread}. “vs” is the difference of balanced accuracy on the same test "
        f"images, with its 95 % interval {reasons}. Best **bold**, second <u>underlined</u> (lowest for "
        f"{', '.join(lower)}).",
        "",
        f"Stage-one methods take {budget}, each with a full batch per stream of images: methods with several "
        "streams see more images. Stage two has the numbers it trains and the settings chosen on validation images, "
        "one per seed.",
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
    shown = {name: SCORES[name] for name in MAIN_SCORES}
    best = {name: ranks(rows, score) for name, score in shown.items()}
    marks = {0: r"\textbf{%s}", 1: r"\underline{%s}"}
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape(caption)}}}",
        rf"\begin{{tabular}}{{l{'c' * len(shown)}}}",
        r"\toprule",
    ]
    lines.append("Method & " + " & ".join(score.heading for score in shown.values()) + r" \\")
    family = None
    for row in rows:
        if row.family != family:
            family = row.family
            title = rf"\multicolumn{{{len(shown) + 1}}}{{l}}{{\emph{{{FAMILIES[family]}}}}} \\"
            lines += [r"\midrule", title]
        numbers = [
            marks.get(best[name].get(row.method, 2), "%s") % show_interval(score, row.scores[name], plus_minus=r"$\pm$")
            for name, score in shown.items()
        ]
        lines.append(_escape(row.title) + " & " + " & ".join(numbers) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(words.get(letter, rf"\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
