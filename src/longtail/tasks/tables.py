"""The results of a comparison as tables: tidy CSV, JSON, Markdown and LaTeX in the paper's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.files import write_json, write_text
from longtail.core.provenance import provenance
from longtail.errors import UserError
from longtail.metrics.intervals import Interval, over_seeds, paired_difference
from longtail.metrics.scores import SHOTS

SCORES = (*SHOTS, "balanced", "macro_f1", "ece")
HEADINGS = dict(zip(SCORES, ("Many", "Medium", "Few", "Overall", "Macro F1", "ECE"), strict=True))
FAMILIES = {
    "standard": "Standard training",
    "re-sampling": "Data re-sampling",
    "loss": "Loss function engineering",
    "decision boundary": "Decision boundary adjustment",
    "confidence": "Confidence calibration",
    "network": "Others",
}
REFERENCES = ("softmax", "marc")


@dataclass(frozen=True)
class Row:
    """One method: its scores over seeds, and its difference from the references on the same test samples."""

    method: str
    title: str
    family: str
    seeds: int
    scores: dict[str, Interval | None]
    against: dict[str, Interval]
    parameters: int | None = None


def summarise(results: Sequence[dict[str, Any]], cells: Path) -> list[Row]:
    """Rows of the table, by family; `cells` is the folder with the predictions."""
    if not results:
        raise UserError("there are no results to summarise")
    _require_one_data_set(results)
    correct: dict[str, list[np.ndarray]] = {}
    for result in results:
        predictions, labels = read_predictions(cells / f"{result['method']}-seed{result['seed']}.npz")
        correct.setdefault(result["method"], []).append(predictions == labels)
    rows = []
    for method in correct:
        own = [result for result in results if result["method"] == method]
        scores = {}
        for name in SCORES:
            values = [result["metrics"][name] for result in own]
            scores[name] = None if None in values else over_seeds(values)
        against = {
            reference: paired_difference(np.stack(correct[method]), np.stack(correct[reference]), labels)
            for reference in REFERENCES
            if reference in correct and reference != method
        }
        first = own[0]
        rows.append(Row(method, first["title"], first["family"], len(own), scores, against, first.get("parameters")))
    order = list(FAMILIES)
    return sorted(rows, key=lambda row: order.index(row.family) + (0.5 if row.method.startswith("marc") else 0))


def _require_one_data_set(results: Sequence[dict[str, Any]]) -> None:
    def data(result: dict[str, Any]) -> tuple[Any, ...]:
        config = result["identity"]["config"]
        return config["data"], config["profile"], config["imbalance"], len(result["class_counts"])

    if len({data(result) for result in results}) > 1:
        found = sorted({f"{data(result)[0]} x {data(result)[2]:g}" for result in results})
        raise UserError(f"results of different data sets do not go into one table: {', '.join(found)}")


def read_predictions(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes (N,) of a cell's test samples."""
    with path.open("rb") as raw, np.load(raw) as file:
        return file["predictions"], file["labels"]


def write_tables(rows: list[Row], results: Sequence[dict[str, Any]], folder: Path, caption: str) -> list[Path]:
    """results.csv (tidy), results.json, table.md and table.tex; with where they come from."""
    summary = [asdict(row) for row in rows]
    origin = {**provenance(), "seeds": ", ".join(str(seed) for seed in sorted({row["seed"] for row in results}))}
    beside = "\n" + "".join(f"- {name}: {value}\n" for name, value in origin.items())
    return [
        write_text(folder / "results.csv", tidy_csv(results)),
        write_json(folder / "results.json", {"caption": caption, **origin, "rows": summary}),
        write_text(folder / "table.md", markdown(rows, caption) + beside),
        write_text(folder / "table.tex", latex(rows, caption)),
    ]


def tidy_csv(results: Sequence[dict[str, Any]]) -> str:
    """One line per method, seed and score."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "family", "seed", "score", "value"])
    for result in results:
        for name in ("top1", *SCORES):
            value = result["metrics"][name]
            writer.writerow([result["method"], result["family"], result["seed"], name, "" if value is None else value])
    return text.getvalue()


def _ranks(rows: list[Row], score: str) -> dict[str, int]:
    """Method → 0 for the best, 1 for the second best number as shown; lower is better for the calibration error."""
    known = {row.method: round(100 * interval.value, 1) for row in rows if (interval := row.scores[score]) is not None}
    best = sorted(set(known.values()), reverse=score != "ece")[:2]
    return {method: best.index(value) for method, value in known.items() if value in best}


def _number(interval: Interval | None, *, plus_minus: str = "±") -> str:
    if interval is None:
        return "none"
    value = f"{100 * interval.value:.1f}"
    half = interval.half_width
    return value if half is None else f"{value} {plus_minus} {100 * half:.1f}"


def _range(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{100 * interval.value:+.1f}"
    return f"{100 * interval.value:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def markdown(rows: list[Row], caption: str) -> str:
    """Families as in the paper; best bold, second underlined."""
    columns = ["Method", *(HEADINGS[score] for score in SCORES), "vs Softmax", "vs MARC"]
    lines = [caption, "", "| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    ranks = {score: _ranks(rows, score) for score in SCORES}
    marks = {0: "**{}**", 1: "<u>{}</u>"}
    family = None
    for row in rows:
        if row.family != family:
            family = row.family
            lines.append(f"| *{FAMILIES[family]}* |" + " |" * (len(columns) - 1))
        cells = [marks.get(ranks[s].get(row.method, 2), "{}").format(_number(row.scores[s])) for s in SCORES]
        cells += [_range(row.against.get(reference)) for reference in REFERENCES]
        lines.append("| " + " | ".join([row.title, *cells]) + " |")
    seeds = rows[0].seeds
    lines += [
        "",
        f"Per cent; {f'mean ± 95 % interval over {seeds} seeds' if seeds > 1 else 'one seed'}. "
        "Overall is balanced accuracy. "
        "“vs” is the difference of balanced accuracy on the same test images with its paired bootstrap 95 % interval. "
        "Best **bold**, second <u>underlined</u> (lowest for ECE).",
    ]
    return "\n".join(lines) + "\n"


def latex(rows: list[Row], caption: str) -> str:
    """A booktabs table in the paper's layout."""
    shown = (*SHOTS, "balanced")
    ranks = {score: _ranks(rows, score) for score in shown}
    marks = {0: r"\textbf{%s}", 1: r"\underline{%s}"}
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape(caption)}}}",
        r"\begin{tabular}{lcccc}",
        r"\toprule",
    ]
    lines.append("Method & " + " & ".join(HEADINGS[score] for score in shown) + r" \\")
    family = None
    for row in rows:
        if row.family != family:
            family = row.family
            lines += [r"\midrule", rf"\multicolumn{{5}}{{l}}{{\emph{{{FAMILIES[family]}}}}} \\"]
        numbers = [
            marks.get(ranks[s].get(row.method, 2), "%s") % _number(row.scores[s], plus_minus=r"$\pm$") for s in shown
        ]
        lines.append(_escape(row.title) + " & " + " & ".join(numbers) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    words = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(words.get(letter, rf"\{letter}" if letter in "&%$#_{}" else letter) for letter in text)
