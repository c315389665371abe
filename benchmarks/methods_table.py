"""Write the tables of methods: ten rows into the README, all of them into docs/methods.md.

Names and papers come from the library, numbers from docs/results.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from common import HERE, RESULTS, rows_of, title_of

from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.metrics.intervals import FEWEST_SEEDS
from longtail.paper.items import NUMBERS
from longtail.tasks.tables import FAMILIES

# What a column is called → its folders below docs/results; the first that has a method counts. Longest training first.
SETS = {
    "digits-LT": ("digits-lt",),
    "CIFAR-10-LT 100, the paper's budget": ("table2/paper/cifar10-lt-100",),
    "CIFAR-10-LT 100, 200 epochs": ("table2/200epochs/cifar10-lt-100",),
    "CIFAR-10-LT 100, 60 epochs": ("cifar10-lt-100", "systems-resnet32/cifar10-lt-100"),
    "CIFAR-100-LT 100, the paper's budget": ("table2/paper/cifar100-lt-100",),
    "CIFAR-100-LT 100, 200 epochs": ("table2/200epochs/cifar100-lt-100",),
    "CIFAR-100-LT 100, 60 epochs": ("cifar100-lt-100", "systems-resnet32/cifar100-lt-100"),
    "CIFAR-10-LT 100, ResNet-8": ("systems/cifar10-lt-100",),
    "CIFAR-100-LT 100, ResNet-8": ("systems/cifar100-lt-100",),
}
START, END = "<!-- methods -->\n", "<!-- /methods -->"
# The README's rows; everything else stands on the page of all methods.
SHOWN = ("softmax", "cbs", "ldam", "balanced-softmax", "crt", "lws", "disalign", "logit-adjustment", "marc", "halo")


@dataclass(frozen=True)
class Column:
    """What was measured on one data set: its rows by method."""

    title: str
    folders: tuple[str, ...]
    rows: dict[str, dict[str, Any]]

    @property
    def data(self) -> str:
        """The data set, without the training."""
        return self.title.partition(",")[0]

    @property
    def recipe(self) -> str:
        return self.data.lower().replace("cifar-", "cifar").replace(" ", "-")

    @property
    def seeds(self) -> int:
        return max(map(count_of, self.rows.values()))

    @property
    def heading(self) -> str:
        return f"{self.title}, {seeds_text(self.seeds)}"

    def links(self, results: str) -> str:
        """To the table of each folder, below the folder of results."""
        first, *further = (f"{results}/{folder}/table.md" for folder in self.folders)
        return f"[{self.title}]({first})" + "".join(f" (with [stage-one methods]({link}))" for link in further)

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
    return [Column(title, folders, rows) for title, folders in SETS.items() if (rows := by_method(folders))]


def by_method(folders: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The rows of a column by method."""
    return {row["method"]: row for folder in reversed(folders) for row in rows_of(RESULTS / folder)}


def short(paper: str) -> str:
    """Authors and venue."""
    parts = paper.split(", ")
    return f"{parts[0]}, {parts[-1]}" if len(parts) > 2 else paper


def longest(measured: list[Column]) -> list[Column]:
    """Of each data set the column of the longest training."""
    return list({column.data: column for column in reversed(measured)}.values())[::-1]


def in_paper(recipe: str, method: str) -> str:
    numbers = NUMBERS[recipe].get(method)
    return f"{numbers[0]:.1f}" if numbers else ""


def table(measured: list[Column], shown: Collection[str], results: str) -> str:
    """Methods by family, then how to read them; `results` is the folder of results, seen from the page."""
    papers = [column.recipe for column in longest(measured) if column.recipe in NUMBERS]
    headings = ["Method", "`--method`", "From", *(column.heading for column in measured)]
    headings += [f"{title_of(recipe)} in the paper" for recipe in papers]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|---|" + "---:|" * (len(headings) - 3)]
    methods = {name: method for name, method in {**TRAIN_METHODS, **POSTHOC_METHODS}.items() if name in shown}
    for family, title in FAMILIES.items():
        own = {name: method for name, method in methods.items() if method.family == family}
        lines += [f"| *{title}* |" + " |" * (len(headings) - 1)] if own else []
        for name, method in own.items():
            cells = [*(column.score(name) for column in measured), *(in_paper(recipe, name) for recipe in papers)]
            lines.append("| " + " | ".join([method.title, f"`{name}`", short(method.paper), *cells]) + " |")
    pages = ", ".join(column.links(results) for column in measured)
    lines += [
        "",
        "Balanced test accuracy in per cent (in brackets: few-shot classes; CIFAR-10-LT 100 has none, so medium-shot).",
        "Empty: not measured with this length of training, or not in the paper.",
        f"Fewer than {FEWEST_SEEDS} seeds say nothing about another training. Intervals, variants and how it was made:",
        f"{pages}. Everything beside the paper's numbers: [results]({results}/README.md).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    measured = columns()
    readme = HERE.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    few = table(longest(measured), SHOWN, "docs/results")
    readme.write_text(before + few + after, encoding="utf-8")
    whole = table(measured, {**TRAIN_METHODS, **POSTHOC_METHODS}, "results")
    page = f"# All methods\n\nEvery method by its name on the command line, with what was measured.\n\n{whole}"
    (HERE.parent / "docs" / "methods.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
