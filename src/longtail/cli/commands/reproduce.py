"""`longtail reproduce`: the paper's tables and figures by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from longtail.cli.commands.compare import refuse_single
from longtail.cli.parsing import Output, parse
from longtail.cli.starting_point import starting_point
from longtail.config import TrainConfig
from longtail.errors import UserError, choose
from longtail.recipes import RECIPES
from longtail.report.paper import ITEMS, toy_of

ANY_RECIPE = "digits-lt"  # to read the options that are not of a recipe

HELP = f"""Reproduce a table or figure of the paper: train, calibrate, and write it next to the paper's numbers.

  longtail reproduce NAME --out FOLDER [OPTIONS]
  longtail reproduce                  lists the names, and the data each needs

Names: {", ".join(ITEMS)}.

Runs are kept in FOLDER/RECIPE, as `longtail compare RECIPE --out FOLDER/RECIPE` writes them. Tables and figures share
these runs, and the same command continues after an interruption. The result is written to FOLDER/NAME. Settings of
training are those of `longtail train`; they replace those of the recipes. Figures show the first seed.

Examples:
  longtail reproduce figure-gamma --toy --out paper-toy
  longtail reproduce table-cifar --root data --download --out paper
  longtail reproduce table-boundary --released --root data --out paper
  longtail reproduce table-cifar --root data --recipes cifar10-lt-100 --methods softmax lws marc --epochs 60 --out paper
"""


@dataclass(frozen=True)
class Reproduce(Output):
    """How to reproduce it, and where to write it."""

    settings: tyro.conf.OmitArgPrefixes[TrainConfig]
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
    """Start from the released networks (`longtail released`) instead of training: their recipes, seeds and settings."""
    toy: bool = False
    """Use long-tailed digits and a few steps instead of every recipe, to see the result in seconds."""


def main(arguments: list[str]) -> int:
    words = list(arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else None
    start = starting_point(Reproduce, "reproduce", [ANY_RECIPE, *words])
    first = parse(Reproduce, start.words, "reproduce", HELP, default=Reproduce(settings=start.config))
    if name is None:
        return _list(first)
    item = ITEMS[choose("table or figure", name, ITEMS)]
    _check(first, name)
    assert first.out is not None
    configs = {recipe: _config(recipe, words, first.toy) for recipe in first.recipes or item.recipes}
    seeds = dict.fromkeys(configs, first.seeds)
    from longtail.report.reproduce import reproduce
    from longtail.report.work import Work, released_config, released_networks

    display = first.display()
    if first.download:
        from longtail.data.download import download_cifar

        for data, root in {(config.data, config.root) for config in configs.values()}:
            download_cifar(data, root, display)
    if first.released:
        networks = released_networks(configs)
        configs = {recipe: released_config(own, configs[recipe], recipe) for recipe, own in networks.items()}
        seeds = {recipe: tuple(own) for recipe, own in networks.items()}
    work = Work(name, item, configs, first.out, seeds, first.methods, first.jobs, display, first.released)
    page = reproduce(work)
    display.line(f"written: {page}")
    first.print_json({"page": str(page), "results": str(page.parent / "results.json")})
    return 0


def _config(recipe: str, words: list[str], toy: bool) -> TrainConfig:
    """A recipe with the settings given on the command line."""
    start = starting_point(Reproduce, "reproduce", [recipe, *words], toy_of if toy else None)
    settings = parse(Reproduce, start.words, "reproduce", HELP, default=Reproduce(settings=start.config)).settings
    refuse_single(settings, start.config)
    return settings


def _check(options: Reproduce, name: str) -> None:
    item = ITEMS[name]
    if options.out is None:
        raise UserError("missing from longtail reproduce: --out PATH; see longtail reproduce --help")
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


def _check_released(options: Reproduce, name: str) -> None:
    """Nothing is trained for an item from released networks."""
    if options.toy or not ITEMS[name].recipes:
        raise UserError(f"{'--toy' if options.toy else name} needs no released networks; leave out --released")
    if options.seeds != Reproduce.seeds:
        raise UserError("--released takes the seeds of the released networks; leave out --seeds")
    from longtail.tasks.entries import BASE, Entry

    for method in options.methods:
        if Entry.of(method).stage_one != BASE:
            raise UserError(f"{method} would have to be trained; leave it out, or leave out --released")


def _list(options: Reproduce) -> int:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("name", "in the paper", "what", "recipes", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for name, item in ITEMS.items():
        table.add_row(name, item.where, item.what, ", ".join(item.recipes))
    options.display().table(table)
    options.print_json([{"name": name, **asdict(item)} for name, item in ITEMS.items()])
    return 0
