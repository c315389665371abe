"""The inputs of an item of the paper: recipes, seeds, methods, and its comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from longtail.config import OF_MACHINE, TrainConfig, describe, differences
from longtail.data.splits import open_splits
from longtail.errors import UserError
from longtail.files.progress import Display
from longtail.paper.items import NUMBERS, Item
from longtail.recipes import RECIPES
from longtail.runs.folder import Run
from longtail.runs.record import RELEASED, copy_released, released_names
from longtail.tasks.cells import BASE, Cell, Entry, Result
from longtail.tasks.compare import compare
from longtail.tasks.tables import Row, summarise, write_tables
from longtail.training.plan import Plan


@dataclass(frozen=True)
class Work:
    """An item with all of its inputs.

    Args:
        name: name of the item.
        item: its entry in the table of items.
        configs: recipe → its training run.
        out: folder of runs and results.
        seeds: recipe → its seeds; drawings show the first.
        methods: what to compare instead of the item's.
        jobs: number of cells to work on in parallel.
        display: where progress is shown.
        released: whether the networks are released ones, and nothing is trained.
    """

    name: str
    item: Item
    configs: dict[str, TrainConfig]
    out: Path
    seeds: dict[str, tuple[int, ...]]
    methods: tuple[str, ...]
    jobs: int
    display: Display
    released: bool = False

    @property
    def folder(self) -> Path:
        return self.out / self.name

    def methods_of(self, recipe: str) -> tuple[str, ...]:
        """The methods to compare on a recipe: those given, those of the item, or those of the paper for this data."""
        every = dict.fromkeys(method for other in self.item.recipes for method in NUMBERS.get(other, {}))
        default = self.item.methods or tuple(NUMBERS.get(recipe, every))
        if self.released:
            default = tuple(method for method in default if Entry.of(method).stage_one == BASE)
        return self.methods or default

    def compared(self, recipe: str, methods: tuple[str, ...], seeds: tuple[int, ...]) -> list[Result]:
        config, out = self.configs[recipe], self.out / recipe
        self.display.line(f"{recipe}: {describe(config)}")
        return compare(config, methods, out, seeds=seeds, jobs=self.jobs, display=self.display)

    def rows(self, recipe: str) -> list[Row]:
        """The comparison on a recipe; its tables are written beside its cells."""
        results = self.compared(recipe, self.methods_of(recipe), self.seeds[recipe])
        rows = summarise(results, self.out / recipe / "cells")
        write_tables(rows, results, self.out / recipe, describe(self.configs[recipe]))
        return rows

    def run_folder(self, recipe: str, seed: int) -> Path:
        """Of the Softmax run of a recipe."""
        return Cell(BASE, seed, self.configs[recipe], 1, self.out / recipe).run_folder

    def run(self, recipe: str, seed: int) -> Run:
        """The Softmax run of a recipe."""
        return Run.open(self.run_folder(recipe, seed))


def released_networks(recipes: Iterable[str]) -> dict[str, dict[int, Run]]:
    """Recipe → seed → the released Softmax network; recipes without one are left out.

    Networks that were trained differently are not mixed: those of a recipe that have the most seeds are taken,
    then those that were trained for longest.
    """
    groups: dict[str, list[dict[int, Run]]] = {}  # recipe → networks that were trained alike, by seed
    for name in released_names():
        run = Run.open(f"{RELEASED}{name}")
        for recipe in recipes:
            if run.config.method == BASE.name and _task(run.config) == _task(RECIPES[recipe]):
                candidates = groups.setdefault(recipe, [])
                alike = next((group for group in candidates if not _changed(group, run)), None)
                if alike is None:
                    candidates.append(alike := {})
                alike[run.config.seed] = run
    for recipe, candidates in groups.items():
        candidates.sort(key=_seeds_and_images, reverse=True)
        if len(candidates) > 1 and _seeds_and_images(candidates[0]) == _seeds_and_images(candidates[1]):
            changed = "; ".join(_changed(candidates[0], next(iter(candidates[1].values()))))
            raise UserError(f"the released networks of {recipe} were trained differently: {changed}")
    if not groups:
        names = ", ".join(recipes)
        raise UserError(f"there is no released network for {names}: `longtail methods --released` lists them")
    return {recipe: dict(sorted(groups[recipe][0].items())) for recipe in recipes if recipe in groups}


def _task(config: TrainConfig) -> tuple[object, ...]:
    """Data, and the options that change what a method is."""
    return config.data, config.profile, config.imbalance, config.shuffle_classes, config.mix, config.defer


def _seeds_and_images(group: dict[int, Run]) -> tuple[int, int]:
    """Number of networks; images that each was trained on, counted as often as they were seen."""
    run = next(iter(group.values()))
    plan = Plan.of(run.config, run.split_sizes["train"])
    return len(group), plan.images_at(plan.steps)


def _changed(group: dict[int, Run], run: Run) -> list[str]:
    """Settings in which a network differs from those of a group, but for the seed."""
    config = next(iter(group.values())).config
    return differences(config, replace(run.config, seed=config.seed))


def released_config(networks: dict[int, Run], given: TrainConfig, recipe: str) -> TrainConfig:
    """The configuration of the released networks of a recipe, with the given paths."""
    if changed := differences(RECIPES[recipe], given):
        raise UserError(f"--released takes the settings of the released networks; leave out {changed[0].split(':')[0]}")
    first = next(iter(networks.values()))
    return replace(first.config, **{name: getattr(given, name) for name in OF_MACHINE})


def take_released(work: Work) -> None:
    """Copy released networks to the run folders of the comparisons."""
    for recipe, networks in released_networks(work.configs).items():
        for seed, run in networks.items():
            copy_released(run.folder, work.run_folder(recipe, seed))


def require_data(work: Work) -> None:
    """Raises with the names of all missing data sets, before anything is trained."""
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
