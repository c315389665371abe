"""`python -m longtail.paper`: the paper's tables and figures by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from longtail.cli.commands.compare import refuse_single
from longtail.cli.main import program
from longtail.cli.parsing import HELP_WORDS, Training, parse, read_training
from longtail.errors import UserError, choose
from longtail.paper.items import ITEMS, toy_of
from longtail.recipes import RECIPES

PROGRAM = "python -m longtail.paper"
HELP = f"""Reproduce a table or figure of the paper: train, calibrate, and write it next to the paper's numbers.

  python -m longtail.paper NAME --out FOLDER [OPTIONS]
  python -m longtail.paper                  lists the names, and the data each needs

Names: {", ".join(ITEMS)}.

Runs are kept in FOLDER/RECIPE, as `longtail compare RECIPE --out FOLDER/RECIPE` writes them. Tables and figures share
these runs, and the same command continues after an interruption. The result is written to FOLDER/NAME. Settings of
training are those of `longtail train`; they replace those of the recipes. Figures show the first seed.

Examples:
  python -m longtail.paper figure-gamma --toy --out paper-toy
  python -m longtail.paper table-cifar --root data --download --out paper
  python -m longtail.paper table-boundary --released --root data --out paper
  python -m longtail.paper table-cifar --root data --recipes cifar10-lt-100 --methods softmax marc --out paper
"""


@dataclass(frozen=True, kw_only=True)
class Reproduce(Training):
    """How to reproduce it, and where to write it."""

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """Table or figure; without it, the names are listed."""
    out: Path | None = None
    """Folder of runs and results; made if it does not exist."""
    recipes: tuple[str, ...] = ()
    """Recipes to use instead of those of the paper."""
    methods: tuple[str, ...] = ()
    """Tables of accuracy: methods to use instead of those of the paper, as in `longtail compare`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of tables."""
    jobs: int = 1
    """Number of runs to work on in parallel."""
    download: bool = False
    """Fetch CIFAR from its page first if it is not below --root."""
    released: bool = False
    """Start from the released networks (`longtail methods --released`) instead of training: their recipes, seeds and
    settings."""
    toy: bool = False
    """Use long-tailed digits and a few steps instead of every recipe, to see the result in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with `arguments`, or with those of its process; returns its exit code."""
    return program(_reproduce, arguments)


def _reproduce(words: list[str]) -> int:
    options = read_training(Reproduce, words, PROGRAM)
    if HELP_WORDS & {*words}:
        parse(Reproduce, words, PROGRAM, HELP, default=Reproduce(settings=RECIPES["cifar10-lt-100"]))
    if options.source is None:
        return _list(options)
    item = ITEMS[choose("table or figure", options.source, ITEMS)]
    out = _checked(options, options.source)
    refuse_single(options, words)
    recipes = {name: RECIPES[name] for name in options.recipes or item.recipes}
    configs = {name: options.over(toy_of(config) if options.toy else config, words) for name, config in recipes.items()}
    seeds = dict.fromkeys(configs, options.seeds)
    from longtail.data.cifar import download_cifar
    from longtail.paper.reproduce import reproduce
    from longtail.paper.work import Work, released_config, released_networks

    display = options.display()
    if options.download:
        for data, root in {(config.data, config.root) for config in configs.values()}:
            download_cifar(data, root, display)
    if options.released:
        networks = released_networks(configs)
        configs = {recipe: released_config(runs, configs[recipe], recipe) for recipe, runs in networks.items()}
        seeds = {recipe: tuple(runs) for recipe, runs in networks.items()}
    work = Work(options.source, item, configs, out, seeds, options.methods, options.jobs, display, options.released)
    page = reproduce(work)
    display.line(f"written: {page}")
    options.print_json({"page": str(page), "results": str(page.parent / "results.json")})
    return 0


def _checked(options: Reproduce, name: str) -> Path:
    """The folder of the results; raises for options that the table or figure cannot have."""
    item = ITEMS[name]
    if options.out is None:
        raise UserError(f"name the folder of runs and results: --out FOLDER; see {PROGRAM} --help")
    if options.methods and item.kind not in ("accuracy", "parameters"):
        raise UserError(f"{name} compares no other methods; leave out --methods")
    if options.recipes and not item.recipes:
        raise UserError(f"{name} needs no data; leave out --recipes")
    if len(options.recipes) > 1 and item.figures:
        raise UserError(f"{name} shows one data set; give --recipes one name")
    for recipe in options.recipes:
        choose("recipe", recipe, RECIPES)
    if not options.seeds:
        raise UserError("give at least one seed")
    if options.toy and options.download:
        raise UserError("--toy needs no data; leave out --download")
    if options.released:
        _check_released(options, name)
    return options.out


def _check_released(options: Reproduce, name: str) -> None:
    """Raise for options that would need training: with --released nothing is trained."""
    if options.toy or not ITEMS[name].recipes:
        raise UserError(f"{'--toy' if options.toy else name} needs no released networks; leave out --released")
    if options.seeds != Reproduce.seeds:
        raise UserError("--released takes the seeds of the released networks; leave out --seeds")
    from longtail.tasks.cells import BASE, Entry

    for method in options.methods:
        if Entry.of(method).stage_one != BASE:
            raise UserError(f"{method} would have to be trained; leave it out, or leave out --released")


def _list(options: Reproduce) -> int:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("name", "in the paper", "what", "recipes", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    table.columns[2].min_width = 18  # its longest word
    for name, item in ITEMS.items():
        table.add_row(name, item.where, item.what, ", ".join(item.recipes))
    options.display().table(table)
    options.print_json([{"name": name, **asdict(item)} for name, item in ITEMS.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
