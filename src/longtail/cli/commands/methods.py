"""`longtail methods`: every method, or the released networks."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from longtail.cli.parsing import Output, parse

HELP = """List every method of the library, or the released networks.

Stage-one methods train a network (`longtail train --method NAME`); stage-two methods calibrate a
trained one (`longtail calibrate --method NAME`). p is the number of features, K of classes.

--released lists the trained networks in the folder `released` of a clone, or in the one that LONGTAIL_RELEASED names.
Every command that takes a run also takes released:NAME: the network is first copied to runs/NAME in the current folder.
In Python: longtail.load("released:NAME").

Examples:
  longtail methods
  longtail methods --json
  longtail methods --released
"""


@dataclass(frozen=True)
class Methods(Output):
    """What to list."""

    released: bool = False
    """List the released networks instead."""


def main(words: list[str]) -> int:
    options = parse(Methods, words, "longtail methods", HELP)
    rows, columns = _released() if options.released else _methods()
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for heading, name in columns.items():
        # The longest word of these columns has 13 letters.
        table.add_column(heading, no_wrap=name == "name", min_width=13 if name in ("needs", "paper") else None)
    for row in rows:
        table.add_row(*(_short(str(row[name])) if name == "paper" else str(row[name]) for name in columns.values()))
    options.display().table(table)
    options.print_json(rows)
    return 0


def _methods() -> tuple[list[dict[str, object]], dict[str, str]]:
    """Rows, and the columns of the table: heading → name."""
    from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS

    entries = [(name, 1, "network", method) for name, method in TRAIN_METHODS.items()]
    entries += [(name, 2, method.trains, method) for name, method in POSTHOC_METHODS.items()]  # type: ignore[misc]
    details = ("title", "family", "paper", "needs")
    rows = [
        {"name": name, "stage": stage, "trains": trains, **{detail: getattr(method, detail) for detail in details}}
        for name, stage, trains, method in entries
    ]
    columns = {name: name for name in ("name", "stage", "family", "trains", "needs")}
    return rows, {**columns, "from": "paper"}


def _released() -> tuple[list[dict[str, object]], dict[str, str]]:
    from longtail.config import describe
    from longtail.runs.folder import Run
    from longtail.runs.record import RELEASED, released_names

    configs = {name: Run.open(f"{RELEASED}{name}").config for name in released_names()}
    rows: list[dict[str, object]] = [
        {"name": name, "method": config.method, "data": describe(config), "seed": config.seed}
        for name, config in configs.items()
    ]
    return rows, {"name": "name", "trained with": "method", "on": "data"}


def _short(text: str) -> str:
    """Authors and venue of a paper; `--json` has the title.

    >>> _short("Kang et al., Decoupling Representation and Classifier, ICLR 2020")
    'Kang et al., ICLR 2020'
    """
    parts = text.split(", ")
    return f"{parts[0]}, {parts[-1]}" if len(parts) > 2 else text
