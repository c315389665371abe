"""`longtail released`: the trained networks that come with the repository."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.cli.parsing import Output, parse

HELP = """List the trained networks that come with the repository.

Every command that takes a run also takes released:NAME: the network is first copied to runs/NAME in the current
folder, and results are written there. In Python: longtail.load("released:NAME").
They are in the folder released of a clone, or in the folder that LONGTAIL_RELEASED names.

Examples:
  longtail released
  longtail evaluate released:cifar10-lt-100-resnet32-seed0 --root data
"""


@dataclass(frozen=True)
class Released(Output):
    """This command has no options of its own."""


def main(arguments: list[str]) -> int:
    options = parse(Released, arguments, "released", HELP)
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from longtail.config import describe
    from longtail.methods import TRAIN_METHODS
    from longtail.runs.folder import Run
    from longtail.runs.released import PREFIX, released_names

    table = Table("name", "trained with", "on", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    rows = []
    for name in released_names():
        run = Run.open(f"{PREFIX}{name}")
        rows.append({"name": name, "method": run.config.method, "data": describe(run.config), "seed": run.config.seed})
        table.add_row(name, TRAIN_METHODS[run.config.method].title, describe(run.config))
    options.display().table(table)
    options.print_json(rows)
    return 0
