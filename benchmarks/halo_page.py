"""The page of docs/results/halo: what HALO has to show on top, then every table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ABOUT = "# HALO, measured\n\nWritten by `benchmarks/halo.py`; every table names its command and commit."
ORDER = ("features", "frozen-fully", "frozen-briefly", "runs-", "digits", "split", "cost", "ablation-")
COMPARED = (
    "features",
    "frozen-fully",
    "frozen-briefly",
    "digits",
    *(f"runs-{data}-lt-{factor}" for data in ("cifar10", "cifar100") for factor in (100, 200)),
)
BASELINES = ("MARC", "Logit adjustment")


def write_page(folder: Path) -> None:
    """README.md of all tables that are there."""
    pages = [page for page in folder.glob("*.md") if page.name != "README.md"]
    pages.sort(key=lambda page: (next(n for n, start in enumerate(ORDER) if page.name.startswith(start)), page.name))
    texts = [page.read_text().replace("\n# ", "\n## ").replace("# ", "## ", 1).rstrip() for page in pages]
    lines = ["## What it has to show", "", "| what | asked | measured | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in _asked(folder)]
    (folder / "README.md").write_text("\n\n".join([ABOUT, "\n".join(lines), *texts]) + "\n")


def _asked(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """What, asked, measured, and whether it is met; of the tables that are there."""
    tables = {name: _rows(folder / f"{name}.json") for name in (*COMPARED, "cost")}
    if features := tables["features"]:
        where = "ResNet-32 for CIFAR-10-LT 100, 10 % long-tailed held out"
        yield _difference(f"HALO minus MARC: {where}", 0.4, features["MARC"])
        error = float(features["HALO"]["ece"])
        yield f"ECE of HALO: {where}", "at most 3", f"{error:.1f}", _met(error <= 3)
    for name, least in (("MARC", 5.0), ("Logit adjustment", 3.0), ("cRT", 2.0)):
        what = f"Cross-fitted HALO minus {name}: CIFAR-100-LT 100, frozen features, fully fitted heads"
        if frozen := tables["frozen-fully"]:
            yield _difference(what, least, frozen[name])
        else:
            yield what, f"at least {least:g}", "not on all classes yet", ""
    for name in COMPARED:
        if table := tables[name]:
            best = max(BASELINES, key=lambda other: float(table[other]["balanced"]))
            text = table[best]["HALO minus it"]
            what = f"HALO minus the better of MARC and logit adjustment ({best}): {name}"
            yield what, "not surely below 0", text, _met(_bounds(text)[1] >= 0)
    for row in tables["cost"].values():
        share, head = float(row["five numbers / MARC"]), row.get("heads and numbers / cRT")
        yield f"Five numbers, of MARC's solve: {row['size']}", "at most 0.10", f"{share:.3f}", _met(share <= 0.1)
        if head is not None:
            yield f"HALO's heads and numbers, of cRT: {row['size']}", "at most 1", head, _met(float(head) <= 1)


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a table by what stands first in them; none if the table is missing or has other columns."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())["rows"]
    known = {"HALO minus it", "five numbers / MARC"} & set(rows[0])
    return {next(iter(row.values())): row for row in rows} if known else {}


def _difference(what: str, least: float, row: dict[str, Any]) -> tuple[str, str, str, str]:
    text = row["HALO minus it"]
    return what, f"at least {least:g}", text, _met(float(text.split()[0]) >= least)


def _bounds(text: str) -> tuple[float, float]:
    """Ends of an interval written as +1.0 [+0.5, +1.5]."""
    low, high = text.split("[")[1].rstrip("]").split(",")
    return float(low), float(high)


def _met(yes: bool) -> str:
    return "yes" if yes else "**no**"
