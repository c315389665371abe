"""`longtail methods`: the table of contents."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.commands.common import Output, parse

HELP = """List every method the library knows.

Stage-one methods train a network (`longtail train --method NAME`); stage-two methods repair a
trained one (`longtail calibrate --method NAME`). p is the number of features, K of classes.

Examples:
  longtail methods
  longtail methods --json
"""


@dataclass(frozen=True)
class Methods(Output):
    """Nothing to choose."""


def main(arguments: list[str]) -> int:
    options = parse(Methods, arguments, "methods", HELP)
    from rich.table import Table

    from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS

    rows = [
        {"name": name, "stage": 1, "trains": "network", **_common(method)} for name, method in TRAIN_METHODS.items()
    ]
    rows += [
        {"name": name, "stage": 2, "trains": method.trains, **_common(method)}
        for name, method in POSTHOC_METHODS.items()
    ]
    table = Table("name", "stage", "family", "trains", "needs", "method and paper")
    for row in rows:
        table.add_row(*(str(row[column]) for column in ("name", "stage", "family", "trains", "needs", "paper")))
    options.display().table(table)
    options.print_json(rows)
    return 0


def _common(method: object) -> dict[str, str]:
    return {name: getattr(method, name) for name in ("title", "family", "paper", "needs")}
