"""`longtail methods`: list every method."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.cli.parsing import Output, parse

HELP = """List every method the library knows.

Stage-one methods train a network (`longtail train --method NAME`); stage-two methods calibrate a
trained one (`longtail calibrate --method NAME`). p is the number of features, K of classes.

Examples:
  longtail methods
  longtail methods --json
"""


@dataclass(frozen=True)
class Methods(Output):
    """This command has no options of its own."""


def main(arguments: list[str]) -> int:
    options = parse(Methods, arguments, "methods", HELP)
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS

    rows = [
        {"name": name, "stage": 1, "trains": "network", **_common(method)} for name, method in TRAIN_METHODS.items()
    ]
    rows += [
        {"name": name, "stage": 2, "trains": method.trains, **_common(method)}
        for name, method in POSTHOC_METHODS.items()
    ]
    table = Table("name", "stage", "family", "trains", "needs", "from", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for row in rows:
        cells = (str(row[column]) for column in ("name", "stage", "family", "trains", "needs"))
        table.add_row(*cells, _short(str(row["paper"])))
    options.display().table(table)
    options.print_json(rows)
    return 0


def _short(paper: str) -> str:
    """Authors and venue; `--json` has the title.

    >>> _short("Kang et al., Decoupling Representation and Classifier, ICLR 2020")
    'Kang et al., ICLR 2020'
    """
    parts = paper.split(", ")
    return f"{parts[0]}, {parts[-1]}" if len(parts) > 2 else paper


def _common(method: object) -> dict[str, str]:
    return {name: getattr(method, name) for name in ("title", "family", "paper", "needs")}
