"""Write docs/results/README.md: everything that was measured on one page, beside the paper's numbers."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from common import RESULTS, how_sure, rows_of, title_of
from systems import BUDGETS, DATA
from table2 import TITLES as LENGTHS

from longtail.files.atomic import write_text
from longtail.metrics.intervals import Interval, show_difference
from longtail.metrics.table import SCORES
from longtail.paper.items import CIFAR, ITEMS, NUMBERS
from longtail.tasks.tables import markdown_table


def seeds_of(rows: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(sorted({seed for row in rows for seed in row["seeds"]}))


def in_paper(recipe: str, method: str) -> str:
    numbers = NUMBERS[recipe].get("marc" if method.startswith("marc") else method)
    return f"{numbers[0]:.1f}" if numbers else "–"


def table2() -> list[str]:
    """Table 2 of the paper beside ours, at the paper's budget and at 200 epochs."""
    known = {}  # recipe and length → method → row
    for recipe, length in product(CIFAR, LENGTHS):
        if rows := rows_of(RESULTS / "table2" / length / recipe):
            known[recipe, length] = {row["method"]: row for row in rows}
    if not known:
        return []
    columns, titles = ["Method"], {}
    for recipe in CIFAR:
        own = [length for name, length in known if name == recipe]
        columns += [f"{title_of(recipe)}: paper"] if own else []
        for length in own:
            columns.append(f"[{LENGTHS[length]}](table2/{length}/{recipe}/README.md)")
            rows = known[recipe, length].values()
            shown = [row for row in rows if "+" not in row["method"] and row["family"] != "confidence"]
            titles |= {row["method"]: row["title"] for row in shown}
    lines = []
    for method, title in titles.items():
        cells = [title.partition(" (seed")[0]]
        for recipe in CIFAR:
            own = [rows.get(method) for (name, _), rows in known.items() if name == recipe]
            cells += [in_paper(recipe, method)] if own else []
            cells += [
                f"{SCORES['top1'].show(row['scores']['top1']['value'])}{seeds_mark(row)}" if row else "" for row in own
            ]
        lines.append(cells)
    return [
        "## Table 2: every system, beside the paper",
        "",
        "ResNet-32, AutoAugment and Cutout, images drawn by the rule of the field's papers. Top-1 on the balanced test "
        "images, per cent; the number of seeds in brackets if there are several. Post-hoc methods calibrate Softmax's "
        "network; the pages in the heading have MARC and HALO on top of the others, all scores, and intervals.",
        "",
        *markdown_table(columns, lines),
    ]


def seeds_mark(row: dict[str, Any]) -> str:
    return f" ({len(row['seeds'])})" if len(row["seeds"]) > 1 else ""


def boundary() -> list[str]:
    """Top-1 of every decision-boundary method on every data set, beside the paper's."""
    known = {recipe: rows for recipe in CIFAR if (rows := rows_of(RESULTS / recipe))}
    # Without `auto`, which chose among methods and is not in the library any more; the pages in the heading have it.
    methods = {row["method"]: row["title"] for rows in known.values() for row in rows if row["method"] != "auto"}
    columns = ["Method"]
    for recipe in known:
        columns += [f"[{title_of(recipe)}]({recipe}/README.md)", "paper"]
    lines = []
    for method, title in methods.items():
        cells = [title]
        for recipe, rows in known.items():
            found = next((row for row in rows if row["method"] == method), None)
            value = found and found["scores"]["top1"]["value"]
            cells += [SCORES["top1"].show(value) if value else "", in_paper(recipe, method)]
        lines.append(cells)
    told: dict[str, list[str]] = {}
    for recipe, rows in known.items():
        told.setdefault(how_sure(seeds_of(rows)), []).append(title_of(recipe))
    missing = [title_of(recipe) for recipe in CIFAR if recipe not in known]
    return [
        "## Decision boundary: one network of 60 epochs, every method",
        "",
        "ResNet-32, AutoAugment and Cutout. All methods of a column calibrate the same released networks; top-1 on the "
        "balanced test images, per cent. NLL, ECE, many, medium, few: on the pages in the heading, which also say why "
        "the numbers differ from the paper's.",
        "",
        *markdown_table(columns, lines),
        "",
        *(f"- {', '.join(titles)}: {line}" for line, titles in told.items()),
        *([f"- Not measured yet: {', '.join(missing)}."] if missing else []),
    ]


def systems() -> list[str]:
    """Stage-one methods alone and with MARC and HALO on top."""
    lines = [
        "## Every system at one budget",
        "",
        "Does calibration still help after a method that is balanced already? Every method on a small network, and "
        "some on a network that is trained longer.",
        "",
    ]
    for budget, recipe in product(BUDGETS.values(), DATA):
        rows = {row["method"]: row for row in rows_of(RESULTS / budget.folder / recipe)}
        if not rows:
            continue
        trained = [name for name, row in rows.items() if row["stage_one"] == name]
        table = []
        for name in trained:
            cells = [rows[name]["title"], SCORES["balanced"].show(rows[name]["scores"]["balanced"]["value"])]
            for top in ("marc", "halo"):
                row = rows.get(top if name == "softmax" else f"{name}+{top}")
                cells.append(show_difference(Interval(**row["against"][name])) if row else "")
            table.append(cells)
        heading = f"[{title_of(recipe)}, {budget.title}]({budget.folder}/{recipe}/README.md)"
        lines += [
            *markdown_table([heading, "alone", "+ MARC", "+ HALO"], table),
            "",
            how_sure(seeds_of(list(rows.values()))),
            "",
        ]
    return lines


def transfer() -> list[str]:
    """Linear heads on frozen features of a pretrained backbone."""
    known = {
        name: path for name in ("fully", "briefly") if (path := RESULTS / "halo" / f"frozen-{name}.json").is_file()
    }
    if not known:
        return []
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in known.items()}
    tables = {name: {row["method"]: row for row in values["rows"]} for name, values in found.items()}
    columns = ["Method"]
    for name, values in found.items():
        heading = f"[head fitted {name}, {values['steps']:,} steps](halo/frozen-{name}.md)"
        columns += [heading, "minus MARC", "ECE"]
    lines = []
    for method in next(iter(tables.values())):
        cells = [method]
        for rows in tables.values():
            row = rows.get(method, {})
            difference = "" if method == "MARC" else row.get("balanced, minus MARC", "")
            cells += [row.get("balanced", ""), difference, row.get("ece", "")]
        lines.append(cells)
    return [
        "## Transfer: a pretrained backbone, left as it is",
        "",
        "EfficientNet-Lite0 (ImageNet) on CIFAR-100-LT 100 at 96 pixels, linear heads; balanced accuracy on the test "
        "images, per cent. No image is held out: HALO is cross-fitted. The pages in the heading say which classes and "
        "how many seeds.",
        "",
        *markdown_table(columns, lines),
    ]


def analyses() -> list[str]:
    """The paper's analyses, by name."""
    found = [name for name in ITEMS if (RESULTS / "analyses" / name / "README.md").is_file()]
    rows = [f"- [{ITEMS[name].where}: {ITEMS[name].what}](analyses/{name}/README.md)" for name in found]
    where = "Each page says on which of these networks it was made in the place of the paper's."
    return ["## The paper's analyses on these networks", "", *rows, "", where] if rows else []


def others() -> list[str]:
    """Every further page, by its own heading."""
    pages = [*RESULTS.glob("*.md"), *RESULTS.glob("*/README.md")]
    shown = {RESULTS / "README.md", *(RESULTS / recipe / "README.md" for recipe in CIFAR)}
    lines = ["## Further measurements", "", "- [Every method on long-tailed digits](digits-lt/table.md)"]
    for path in sorted(set(pages) - shown):
        first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{first}]({path.relative_to(RESULTS)})")
    return lines


def main() -> None:
    head = [
        "# Results",
        "",
        "Every number was written by a program of this repository; its page names command, commit, seeds and machine. "
        "Settings are chosen on validation images cut from the training images, never on test. This page is written by "
        "`benchmarks/results_page.py`.",
    ]
    parts = [head, table2(), boundary(), systems(), transfer(), analyses(), others()]
    write_text(RESULTS / "README.md", "\n\n".join("\n".join(part).strip() for part in parts if part) + "\n")


if __name__ == "__main__":
    main()
