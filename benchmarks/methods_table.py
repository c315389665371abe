"""Write the README's table of methods: names and papers from the library, numbers from docs/results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from common import HERE, RESULTS

from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.metrics.intervals import FEWEST_SEEDS
from longtail.tasks.table_rows import FAMILIES

# Folder below docs/results → what its column is called.
SETS = {
    "digits-lt": "digits-LT",
    "systems/cifar10-lt-100": "CIFAR-10-LT 100, ResNet-8",
    "systems/cifar100-lt-100": "CIFAR-100-LT 100, ResNet-8",
    "cifar10-lt-100/earlier": "CIFAR-10-LT 100, ResNet-32, 100 epochs",
    "cifar10-lt-100": "CIFAR-10-LT 100, ResNet-32",
    "cifar100-lt-100": "CIFAR-100-LT 100, ResNet-32",
}
REPLACED_BY = {"cifar10-lt-100/earlier": "cifar10-lt-100"}  # as soon as that has seeds enough
START, END = "<!-- methods -->\n", "<!-- /methods -->"


@dataclass(frozen=True)
class Column:
    """What was measured on one data set: its rows by method."""

    title: str
    folder: str
    rows: dict[str, dict[str, Any]]
    seeds: int

    @property
    def heading(self) -> str:
        return f"{self.title}, {seeds_text(self.seeds)}"

    def score(self, method: str) -> str:
        """Balanced accuracy (few-shot or, where there is none, medium-shot)."""
        row = self.rows.get(method)
        if row is None:
            return ""
        tail = row["scores"]["few"] or row["scores"]["medium"]
        fewer = "" if count_of(row) == self.seeds else f", {seeds_text(count_of(row))}"
        return f"{100 * row['scores']['balanced']['value']:.1f} ({100 * tail['value']:.1f}){fewer}"


def seeds_text(count: int) -> str:
    return f"{count} seed{'s' * (count > 1)}"


def count_of(row: dict[str, Any]) -> int:
    """Seeds of a row; earlier tables hold their number alone."""
    return row["seeds"] if isinstance(row["seeds"], int) else len(row["seeds"])


def columns() -> list[Column]:
    found = {folder: column for folder, title in SETS.items() if (column := read(folder, title))}
    replaced = [old for old, new in REPLACED_BY.items() if new in found and found[new].seeds >= FEWEST_SEEDS]
    return [column for folder, column in found.items() if folder not in replaced]


def read(folder: str, title: str) -> Column | None:
    path = RESULTS / folder / "results.json"
    if not path.is_file():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return Column(title, folder, {row["method"]: row for row in rows}, max(map(count_of, rows)))


def short(paper: str) -> str:
    """Authors and venue."""
    parts = paper.split(", ")
    return f"{parts[0]}, {parts[-1]}" if len(parts) > 2 else paper


def main() -> None:
    measured = columns()
    headings = ["Method", "`--method`", "From", *(column.heading for column in measured)]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|---|" + "---:|" * len(measured)]
    methods = {**TRAIN_METHODS, **POSTHOC_METHODS}
    for family, title in FAMILIES.items():
        own = {name: method for name, method in methods.items() if method.family == family}
        lines += [f"| *{title}* |" + " |" * (len(headings) - 1)] if own else []
        for name, method in own.items():
            cells = [column.score(name) for column in measured]
            lines.append("| " + " | ".join([method.title, f"`{name}`", short(method.paper), *cells]) + " |")
    pages = ", ".join(f"[{column.title}](docs/results/{column.folder}/table.md)" for column in measured)
    lines += [
        "",
        "Balanced test accuracy in per cent (in brackets: few-shot classes; CIFAR-10-LT 100 has none, so medium-shot).",
        f"Fewer than {FEWEST_SEEDS} seeds say nothing about another training. Intervals, variants and how it was made:",
        f"{pages}. Everything beside the paper's numbers: [results](docs/results/README.md).",
    ]
    readme = HERE.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    readme.write_text(before + "\n".join(lines) + "\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
