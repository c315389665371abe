"""`longtail compare`: methods and seeds on one data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longtail.cli.parsing import Training, read_training, with_data
from longtail.config import describe
from longtail.data.splits import name_of
from longtail.errors import UserError

PROGRAM = "longtail compare"
HELP = """Compare methods on one data set over several seeds.

longtail compare DATA --methods NAME … --out FOLDER [OPTIONS]

For each seed, every decision-boundary method calibrates the same softmax model; write balanced-softmax+marc to
calibrate the model of another stage-one method. Every stage-one method trains for the same number of steps.
Finished runs are reused: the same command continues after an interruption, and new methods or seeds cost only
their runs. Options of a method are written name:option=value. DATA (a recipe, or the path of images), --config
and all settings of training are those of `longtail train`.

Writes results.csv (tidy), results.json, table.md and table.tex to FOLDER.

Examples:
  longtail compare digits-lt --methods softmax tau-norm crt lws disalign marc --seeds 0 1 2 --out runs/digits-compare
  longtail compare cifar10-lt-100 --root data --epochs 60 --methods softmax marc marc:solver=sgd --out runs/c10
"""


@dataclass(frozen=True, kw_only=True)
class Compare(Training):
    """What to compare, and where to write it."""

    methods: tuple[str, ...]
    """Methods, as `longtail methods` lists them; options as in marc:solver=sgd; marc on cbs is cbs+marc."""
    out: Path
    """Folder of the comparison; made if it does not exist."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Random seeds; use at least three, fewer give no interval over seeds."""
    views: int = 1
    """Augmented passes over the training images for fitting decision-boundary methods."""
    jobs: int = 1
    """Number of runs to work on in parallel."""


def refuse_single(options: Training, words: list[str]) -> None:
    """Refuse options of a single run that a comparison takes as a list."""
    given = options.given_settings(words)
    for one, several in (("method", "methods"), ("seed", "seeds"), ("options", "methods NAME:option=value")):
        if one in given:
            raise UserError(f"--{one} is for a single run; a comparison takes --{several}")


def main(words: list[str]) -> int:
    first = read_training(Compare, words, PROGRAM, methods=(), out=Path())
    refuse_single(first, words)
    options, suggestion = with_data(first, words, PROGRAM, HELP)
    from longtail.report.terminal import price_lines, terminal_table
    from longtail.tasks.compare import compare
    from longtail.tasks.tables import summarise, write_tables

    display = options.display()
    if suggestion:
        display.line(suggestion.sentence(options.settings))
    results = compare(
        options.settings,
        options.methods,
        options.out,
        seeds=options.seeds,
        views=options.views,
        jobs=options.jobs,
        display=display,
    )
    rows = summarise(results, options.out / "cells")
    caption = describe(options.settings, name_of(options.settings))
    files = write_tables(rows, results, options.out, caption)
    display.table(terminal_table(rows, caption))
    for line in price_lines(rows):
        display.line(line)
    display.line("written: " + ", ".join(str(file) for file in files))
    scores = {row.method: {name: vars(value) if value else None for name, value in row.scores.items()} for row in rows}
    options.print_json(scores)
    return 0
