"""Every system at one budget on long-tailed CIFAR, alone and with MARC and HALO on top.

Stage-one methods take equal optimiser steps; each finished network is calibrated at once. The cells stay in
docs/results/FOLDER/RECIPE/cells (the runs beside them are not kept in the repository), so that the same command goes on
after an interruption and later ones add seeds:

    OMP_NUM_THREADS=1 python benchmarks/systems.py --root data --seeds 0 1 2
    OMP_NUM_THREADS=1 python benchmarks/systems.py --root data --seeds 0 --budget resnet32 --methods cbs ldam
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import RESULTS, how_sure, title_of

from longtail import RECIPES, TrainConfig, compare
from longtail.config import describe
from longtail.files.atomic import write_text
from longtail.files.progress import Display
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.metrics.intervals import show_difference
from longtail.metrics.table import SCORES
from longtail.paper.work import released_networks
from longtail.runs.record import copy_released
from longtail.tasks.cells import BASE, Cell, Entry, Result
from longtail.tasks.tables import Row, markdown_table, show_interval, summarise, write_tables

DATA = ("cifar10-lt-100", "cifar100-lt-100")
ON_TOP = ("marc", "halo")
# One stream of images first: a method with several takes as many times longer.
ORDER = sorted(TRAIN_METHODS, key=lambda name: len(TRAIN_METHODS[name].samplers))


@dataclass(frozen=True)
class Budget:
    """How each system is trained.

    Args:
        folder: of its pages below docs/results.
        title: of the network.
        settings: of `longtail compare`, instead of the recipe's.
        reading: how to read the page.
        every: whether it is for every method.
        released: whether Softmax's networks are the released ones.
    """

    folder: str
    title: str
    settings: dict[str, Any]
    reading: str
    every: bool = False
    released: bool = False


# As the released networks were trained.
RELEASED = {
    "subset": "seeded",
    "backbone": "resnet32",
    "epochs": 60,
    "batch_size": 128,
    "lr": 0.1,
    "warmup": 450,
    "precision": "bf16",
    "evaluate_every": 10,
    "checkpoint_every": 1,
}
# What two cores manage: every method with three seeds, or a longer training of a few.
BUDGETS = {
    "resnet8": Budget(
        "systems",
        "ResNet-8",
        {
            "subset": "seeded",
            "backbone": "resnet8",
            "epochs": 20,
            "batch_size": 128,
            "lr": 0.1,
            "warmup": 200,
            "evaluate_every": 20,
            "checkpoint_every": 2,
        },
        """On Softmax's network, every decision-boundary and confidence method: [table.md](table.md), with all scores.
The budget is small (the paper trains ResNet-32 on 30 times as many images): read the order of the methods, not their
distance from published numbers. The order can change with the budget: some of the methods on a
[ResNet-32 with 60 epochs](../../systems-resnet32/{recipe}/README.md).""",
        every=True,
    ),
    "resnet32": Budget(
        "systems-resnet32",
        "ResNet-32",
        RELEASED,
        """Does the order of the methods at the [small budget](../../systems/{recipe}/README.md) hold for a network that
is trained longer? Softmax's is the [released](../../../../released/README.md) network, on which
[every decision-boundary method](../../{recipe}/README.md) was measured.""",
        released=True,
    ),
    "resnet32-long": Budget(
        "systems-resnet32-long",
        "ResNet-32, 200 epochs",
        {**RELEASED, "epochs": 200, "evaluate_every": 20, "checkpoint_every": 2},
        """How much of the distance from the paper's numbers is the length of training? The same as the
[released](../../{recipe}/README.md) networks, with 200 instead of 60 epochs: a third of the images that the paper
trains on, instead of a tenth. Every decision-boundary and confidence method on it: [table.md](table.md).
The network: `released:{recipe}-resnet32-200epochs-seed0`.""",
    ),
}

HOW = """every stage-one method takes the same optimiser steps, with a full batch per stream of images. Balanced
accuracy on the test images, per cent (in brackets: few-shot classes, or medium-shot where there are none). MARC and
HALO calibrate the network of the same row; the differences from that network have 95 % intervals."""


def config_of(recipe: str, budget: Budget, root: str | None = None) -> TrainConfig:
    """The recipe at a budget that two cores manage."""
    return replace(RECIPES[recipe], root=root, iterations=None, **budget.settings)


def entries(first: str, budget: Budget) -> list[str]:
    """A stage-one method and what is put on top of it: on Softmax, all, if no other page has them."""
    for_trained = [name for name, method in POSTHOC_METHODS.items() if not method.estimator.for_frozen]
    on_top = for_trained if first == "softmax" and not budget.released else ON_TOP
    return [first, *(f"{first}+{name}" for name in on_top)]


def known_cells(recipe: str, budget: Budget, folder: Path) -> list[Result]:
    """The cells that are done, in order."""
    config = config_of(recipe, budget)
    names = [path.stem for path in (folder / recipe / "cells").glob("*.json")]
    seeds = sorted({int(name.rpartition("-seed")[2]) for name in names})
    every = [entry for first in ORDER for entry in entries(first, budget)]
    cells = [Cell(Entry.of(entry), seed, config, 1, folder / recipe) for entry in every for seed in seeds]
    found = [result for cell in cells if (result := cell.read()) is not None]
    own: dict[str, list[int]] = {}
    for result in found:
        own.setdefault(result["method"], []).append(result["seed"])
    for result in found:
        if (fewer := own[result["method"]]) != seeds:
            result["title"] += f" (seed {', '.join(map(str, fewer))} only)"
    return found


def write_pages(budget: Budget, out: Path, data: Sequence[str]) -> None:
    """For each data set the table of the comparison, and a page that answers what is asked."""
    for recipe in data:
        results = known_cells(recipe, budget, out)
        if not results:
            continue
        folder = out / recipe
        rows = summarise(results, folder / "cells")
        write_tables(rows, results, folder, describe(config_of(recipe, budget)))
        write_text(folder / "README.md", page(recipe, budget, {row.method: row for row in rows}, results))


def page(recipe: str, budget: Budget, rows: dict[str, Row], results: list[Result]) -> str:
    """Does repair still help after each stage-one method?"""
    trained = [first for first in ORDER if first in rows]
    missing = [TRAIN_METHODS[first].title for first in ORDER if first not in rows] if budget.every else []
    seeds = sorted({result["seed"] for result in results})
    origins = {name: sorted({result["origin"][name] for result in results}) for name in ("commit", "time", "machine")}
    name = next(name for name, other in BUDGETS.items() if other is budget)
    return (
        "\n".join(
            [
                f"# Systems at one budget: {title_of(recipe)}, {budget.title}",
                "",
                f"{describe(config_of(recipe, budget))}; {HOW}",
                "",
                *on_top_table(trained, rows),
                "",
                how_sure(tuple(seeds)),
                *([f"Not measured yet at this budget: {', '.join(missing)}."] if missing else []),
                "",
                budget.reading.format(recipe=recipe),
                "",
                f"A row of it (other rows: other names): `{command(recipe, budget, trained, seeds)}`",
                "",
                "- command: OMP_NUM_THREADS=1 python benchmarks/systems.py --root data --seeds "
                + " ".join(map(str, seeds))
                + f" --budget {name}"
                + ("" if budget.every else f" --data {recipe} --methods {' '.join(trained)}"),
                f"- seeds: {', '.join(map(str, seeds))}",
                f"- commit of the cells: {', '.join(origins['commit'])}",
                f"- time of the cells: {origins['time'][0]} to {origins['time'][-1]}",
                f"- machine: {', '.join(origins['machine'])}",
            ]
        )
        + "\n"
    )


def command(recipe: str, budget: Budget, trained: list[str], seeds: list[int]) -> str:
    """The public command of one row: on a copy of this folder it finds the cells that are there."""
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in budget.settings.items())
    return (
        f"longtail compare {recipe} --root data --methods {' '.join(entries(trained[:2][-1], budget))} "
        f"--seeds {' '.join(map(str, seeds))} {settings} --out FOLDER"
    )


def on_top_table(trained: list[str], rows: dict[str, Row]) -> list[str]:
    """Stage-one methods, alone and with what is put on top."""
    lines = []
    for first in trained:
        own = rows[first]
        cells = [own.title, f"{own.steps:,}", f"{own.images:,}", balanced(own)]
        for name in ON_TOP:
            row = rows.get(Entry.of(f"{first}+{name}").label)
            cells += ["", ""] if row is None else [balanced(row), show_difference(row.against.get(first))]
        lines.append(cells)
    columns = ["Stage one", "Steps", "Images seen", "alone"]
    for name in ON_TOP:
        columns += [f"+ {POSTHOC_METHODS[name].title}", "difference"]
    return markdown_table(columns, lines)


def balanced(row: Row) -> str:
    """Balanced accuracy (few-shot or, where there is none, medium-shot)."""
    tail = row.scores["few"] or row.scores["medium"]
    shown = show_interval(SCORES["balanced"], row.scores["balanced"])
    return f"{shown} ({SCORES['few'].show(tail.value)})" if tail else shown


def take_released(recipe: str, config: TrainConfig, seed: int, out: Path) -> None:
    """Softmax's network is there already."""
    copy_released(released_networks([recipe])[recipe][seed].folder, Cell(BASE, seed, config, 1, out).run_folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of CIFAR; without it, the pages are written from the cells there are")
    parser.add_argument("--budget", default="resnet8", choices=BUDGETS)
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--methods", nargs="+", default=ORDER, choices=ORDER)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="folder of runs, cells and pages (default: below docs/results)")
    arguments = parser.parse_args()
    budget, display = BUDGETS[arguments.budget], Display()
    out = arguments.out or RESULTS / budget.folder
    if arguments.root is None:
        return write_pages(budget, out, arguments.data)
    for seed in arguments.seeds:
        for recipe in arguments.data:
            config = config_of(recipe, budget, arguments.root)
            if budget.released and "softmax" in arguments.methods:
                take_released(recipe, config, seed, out / recipe)
            for first in arguments.methods:
                compare(config, entries(first, budget), out / recipe, seeds=(seed,), display=display)
    return write_pages(budget, out, arguments.data)


if __name__ == "__main__":
    main()
