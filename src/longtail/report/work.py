"""What an item of the paper is made from: recipes, seeds, methods, and the comparisons behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longtail.config import TrainConfig, describe
from longtail.core.progress import Display
from longtail.data.open import open_splits
from longtail.errors import UserError
from longtail.report.paper import NUMBERS, Item
from longtail.runs.folder import Run
from longtail.tasks.cells import Cell, Result
from longtail.tasks.compare import compare
from longtail.tasks.entries import BASE
from longtail.tasks.tables import Row, summarise, write_tables


@dataclass(frozen=True)
class Work:
    """An item with everything it is made from.

    Args:
        name: of the item.
        item: its entry in the table of items.
        configs: recipe → its training run.
        out: folder of runs and results.
        seeds: drawings show the first.
        methods: what to compare instead of the item's.
        jobs: cells at a time.
        display: where progress is shown.
    """

    name: str
    item: Item
    configs: dict[str, TrainConfig]
    out: Path
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    jobs: int
    display: Display

    @property
    def folder(self) -> Path:
        return self.out / self.name

    def methods_of(self, recipe: str) -> tuple[str, ...]:
        """Methods to compare on a recipe: given, the item's, or the paper's on this data."""
        every = dict.fromkeys(method for known in self.item.recipes for method in NUMBERS.get(known, {}))
        return self.methods or self.item.methods or tuple(NUMBERS.get(recipe, every))

    def compared(self, recipe: str, methods: tuple[str, ...], seeds: tuple[int, ...]) -> list[Result]:
        config, out = self.configs[recipe], self.out / recipe
        self.display.line(f"{recipe}: {describe(config)}")
        return compare(config, methods, out, seeds=seeds, jobs=self.jobs, display=self.display)

    def rows(self, recipe: str) -> list[Row]:
        """The comparison on a recipe; its own tables are left beside its cells."""
        results = self.compared(recipe, self.methods_of(recipe), self.seeds)
        rows = summarise(results, self.out / recipe / "cells")
        write_tables(rows, results, self.out / recipe, describe(self.configs[recipe]))
        return rows

    def run(self, recipe: str, seed: int) -> Run:
        """The Softmax run of a recipe."""
        return Run.open(Cell(BASE, seed, self.configs[recipe], 1, self.out / recipe).run_folder)


def require_data(work: Work) -> None:
    """Complain of all data sets that are not there, before anything is trained."""
    missing: dict[str, str] = {}
    classes = set()
    for recipe, config in work.configs.items():
        try:
            classes.add(tuple(open_splits(config).split("test").class_names))
        except UserError as error:
            missing.setdefault(config.data, f"{recipe}: {error}")
    if missing:
        raise UserError(
            f"{work.name} needs {', '.join(missing)}: {'; '.join(missing.values())} (or name the recipes whose data "
            "you have with --recipes, or look at it with --toy)"
        )
    if work.item.kind == "stage-one" and len(classes) > 1:
        raise UserError(f"{work.name} takes recipes of the same classes: MARC is fitted on the images of the first")
