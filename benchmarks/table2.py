"""Table 2 of the paper, and more: every system on long-tailed CIFAR, alone and with MARC and HALO on top.

benchmarks/training_queue.py trains the networks. This program calibrates and scores those that are finished, and writes
a page for each data set and length of training:

    OMP_NUM_THREADS=1 python benchmarks/table2.py --root data --queue ~/queue
    python benchmarks/table2.py  # the pages again, from the cells that are there

Cells stay in docs/results/table2/LENGTH/RECIPE/cells; the networks beside them are not kept in the repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from common import RESULTS, how_sure, title_of
from training_queue import LENGTHS, STAGE_ONE, Job, hours_of, is_trained, jobs, steps_done

from longtail import RECIPES, TrainConfig, compare
from longtail.config import describe
from longtail.files.atomic import write_text
from longtail.files.progress import Display
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.metrics.intervals import show_difference
from longtail.metrics.table import SCORES
from longtail.paper.items import NUMBERS
from longtail.tasks.cells import BASE, Cell, Entry, Result
from longtail.tasks.tables import Row, markdown_table, show_interval, summarise, write_tables

ON_TOP = ("marc", "halo")
# On Softmax's network: everything that is fitted after training.
ON_SOFTMAX = (
    *(name for name, method in POSTHOC_METHODS.items() if not method.estimator.for_frozen),
    *("logit-adjustment:tau=auto", "marc:solver=sgd", "marc:gamma=auto"),
)
TITLES = {"paper": "the paper's budget", "200epochs": "200 epochs"}
READING = {
    "paper": "The paper's recipe and length, but 2 % of the training images are held out, so that methods that need "
    "unseen images have some, and the network is that of the last epoch; the paper's code reports the best epoch on "
    "the test images.",
    "200epochs": "About a third of the images that the paper trains on, with a tenth of the training images held out.",
}
HOW = (
    "Balanced accuracy on the test images, per cent (in brackets: few-shot classes, or medium-shot where there are "
    "none). The test set is balanced, so this is top-1. MARC and HALO calibrate the network of the same row; the "
    "differences from that network have 95 % intervals. All scores, and every decision-boundary method on Softmax: "
    "[table.md](table.md)."
)


@dataclass(frozen=True)
class Group:
    """Networks that one comparison can hold: those of a recipe, a length and training options."""

    recipe: str
    length: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return RESULTS / "table2" / self.length / "-".join([self.recipe, *(value for _, value in self.options)])

    def config(self, root: str | None = None) -> TrainConfig:
        """The training run, but for method and seed."""
        settings: dict[str, object] = {"iterations": None} if "epochs" in LENGTHS[self.length] else {}
        types = get_type_hints(TrainConfig)
        for name, value in (LENGTHS[self.length] | dict(self.options)).items():
            field = name.replace("-", "_")
            number = float if "float" in str(types[field]) else int if "int" in str(types[field]) else str
            settings[field] = number(value)
        return replace(RECIPES[self.recipe], root=root, **settings)

    def entries(self, method: str) -> list[str]:
        """A stage-one method and what is put on top of it."""
        on_top = ON_SOFTMAX if method == BASE.name and not self.options else ON_TOP
        return [method, *(f"{method}+{name}" for name in on_top)]

    def results(self) -> list[Result]:
        """The cells that are done, in order."""
        seeds = sorted({int(path.stem.rpartition("-seed")[2]) for path in (self.folder / "cells").glob("*.json")})
        entries = [Entry.of(entry) for method in (BASE.name, *STAGE_ONE) for entry in self.entries(method)]
        cells = [Cell(entry, seed, self.config(), 1, self.folder) for entry in entries for seed in seeds]
        found = [result for cell in cells if (result := cell.read()) is not None]
        for result in found:
            own = [other["seed"] for other in found if other["method"] == result["method"]]
            if own != seeds:
                result["title"] += f" (seed {', '.join(map(str, own))} only)"
        return found


def score(job: Job, queue: Path, root: str) -> None:
    """The cells of a finished network; those that are there are not computed again."""
    group = Group(job.recipe, job.length, job.options)
    config = group.config(root)
    run = Cell(Entry.of(job.method), job.seed, config, 1, group.folder).run_folder
    if not run.exists():
        shutil.copytree(queue / job.name, run, ignore=shutil.ignore_patterns("checkpoint*", "outputs"))
    spent = (queue / job.name).with_suffix(".seconds.json")
    if spent.is_file():  # which the pages show
        hours = hours_of(json.loads(spent.read_text(encoding="utf-8")), steps_done(run))
        write_text(group.folder / "cells" / f"{job.method}-seed{job.seed}.hours", f"{hours:.3f}\n")
    compare(config, group.entries(job.method), group.folder, seeds=(job.seed,), display=Display())


def write_page(group: Group, others: Sequence[Group]) -> None:
    """The tables of a comparison, and a page on which the systems stand beside the paper's numbers."""
    results = group.results()
    rows = summarise(results, group.folder / "cells")
    write_tables(rows, results, group.folder, describe(group.config()))
    seeds = tuple(sorted({result["seed"] for result in results}))
    origins = {name: sorted({result["origin"][name] for result in results}) for name in ("commit", "time", "machine")}
    options = [
        other for other in others if other.options and (other.recipe, other.length) == (group.recipe, group.length)
    ]
    hours = [float(path.read_text(encoding="utf-8")) for path in (group.folder / "cells").glob("*.hours")]
    lines = [
        f"# Systems: {', '.join([title_of(group.recipe), TITLES[group.length], *map(' '.join, group.options)])}",
        "",
        f"{describe(group.config())}. {READING[group.length]} {HOW}",
        "",
        *systems_table(group, rows),
        "",
        how_sure(seeds),
        *(
            f"With `--{' '.join(each)}`: [{other.folder.name}](../{other.folder.name}/README.md)."
            for other in options
            for each in other.options
        ),
        "",
        "- command: OMP_NUM_THREADS=1 python benchmarks/table2.py --root data --queue FOLDER, on the networks of "
        "`python benchmarks/training_queue.py --root data --work FOLDER`",
        f"- processor hours of training: {sum(hours):.1f}, of {len(hours)} network{'s' * (len(hours) != 1)}",
        f"- seeds: {', '.join(map(str, seeds))}",
        f"- commit of the cells: {', '.join(origins['commit'])}",
        f"- time of the cells: {origins['time'][0]} to {origins['time'][-1]}",
        f"- machine: {', '.join(origins['machine'])}",
    ]
    write_text(group.folder / "README.md", "\n".join(lines) + "\n")


def systems_table(group: Group, rows: list[Row]) -> list[str]:
    """Stage-one methods, alone, in the paper, and with what is put on top."""
    by_method = {row.method: row for row in rows}
    lines = []
    for method in TRAIN_METHODS:
        if (own := by_method.get(method)) is None:
            continue
        paper = NUMBERS.get(group.recipe.removesuffix("-release"), {}).get(method) if not group.options else None
        cells = [own.title, f"{own.images:,}", balanced(own), f"{paper[0]:.1f}" if paper else "–"]
        for name in ON_TOP:
            row = by_method.get(Entry.of(f"{method}+{name}").label)
            cells += ["", ""] if row is None else [balanced(row), show_difference(row.against.get(method))]
        lines.append(cells)
    columns = ["Stage one", "Images seen", "alone", "in the paper"]
    for name in ON_TOP:
        columns += [f"+ {POSTHOC_METHODS[name].title}", "difference"]
    return markdown_table(columns, lines)


def balanced(row: Row) -> str:
    """Balanced accuracy (few-shot or, where there is none, medium-shot)."""
    tail = row.scores["few"] or row.scores["medium"]
    shown = show_interval(SCORES["balanced"], row.scores["balanced"])
    return f"{shown} ({SCORES['few'].show(tail.value)})" if tail else shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder of CIFAR")
    parser.add_argument("--queue", type=Path, help="folder of the training queue; without it, pages are written again")
    arguments = parser.parse_args()
    for job in jobs() if arguments.queue else ():
        if is_trained(job, arguments.queue):
            score(job, arguments.queue, arguments.root)
    groups = [
        group
        for length in LENGTHS
        for group in dict.fromkeys(Group(job.recipe, job.length, job.options) for job in jobs() if job.length == length)
        if (group.folder / "cells").is_dir()
    ]
    for group in sorted(groups, key=lambda group: list(RECIPES).index(group.recipe)):
        write_page(group, groups)


if __name__ == "__main__":
    main()
