"""Write the README's table of methods: names and papers from the library, numbers from docs/results."""

from __future__ import annotations

import json

from common import HERE, RESULTS

from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.tasks.tables import FAMILIES

SETS = {"digits-LT": "digits-lt", "CIFAR-10-LT 100": "cifar10-lt-100"}
START, END = "<!-- methods -->\n", "<!-- /methods -->"


def results(name: str) -> tuple[dict[str, dict], int]:
    """Rows of a comparison by method, and its number of seeds."""
    path = RESULTS / name / "results.json"
    if not path.is_file():
        return {}, 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    seeds = rows[0]["seeds"]  # earlier tables hold their number alone
    return {row["method"]: row for row in rows}, seeds if isinstance(seeds, int) else len(seeds)


def score(row: dict | None) -> str:
    """Balanced accuracy (few-shot or, where there is none, medium-shot)."""
    if row is None:
        return ""
    tail = row["scores"]["few"] or row["scores"]["medium"]
    return f"{100 * row['scores']['balanced']['value']:.1f} ({100 * tail['value']:.1f})"


def main() -> None:
    measured = {title: results(name) for title, name in SETS.items()}
    headings = [f"{title}, {seeds} seed{'s' * (seeds > 1)}" for title, (_, seeds) in measured.items() if seeds]
    columns = ["Method", "`--method`", "Paper", *headings]
    lines = ["| " + " | ".join(columns) + " |", "|---|---|---|" + "---:|" * len(headings)]
    methods = {**TRAIN_METHODS, **POSTHOC_METHODS}
    for family, title in FAMILIES.items():
        own = {name: method for name, method in methods.items() if method.family == family}
        lines += [f"| *{title}* |" + " |" * (len(columns) - 1)] if own else []
        for name, method in own.items():
            cells = [score(rows.get(name)) for rows, seeds in measured.values() if seeds]
            lines.append("| " + " | ".join([method.title, f"`{name}`", method.paper, *cells]) + " |")
    lines += [
        "",
        "Balanced test accuracy in per cent (in brackets: few-shot classes; CIFAR-10-LT 100 has none, so medium-shot).",
    ]
    lines += ["Defaults throughout; intervals, variants and how it was made: "]
    lines[-1] += (
        ", ".join(f"[{t}](docs/results/{SETS[t]}/table.md)" for t, (_, seeds) in measured.items() if seeds) + "."
    )
    readme = HERE.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    readme.write_text(before + "\n".join(lines) + "\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
