"""Long-tailed CIFAR with the released networks: decision-boundary methods and the paper's analyses, in minutes.

Computes every table from the networks in released/ (nothing is trained), one page per data set and one per analysis:

    python benchmarks/cifar_lt.py --root data                          # into docs/results
    python benchmarks/cifar_lt.py --root data --out runs/results-quick  # elsewhere; `make results-quick`
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import HERE, RESULTS, cifar_root, how_sure, rows_of, title_of
from systems import BUDGETS

from longtail import MARC, RECIPES, Run, evaluate
from longtail.config import TrainConfig, describe
from longtail.files.atomic import write_text
from longtail.files.progress import Display
from longtail.files.records import provenance
from longtail.metrics import margins
from longtail.metrics.intervals import over_seeds, paired_difference, show_difference
from longtail.metrics.table import SCORES
from longtail.paper.items import CIFAR, ITEMS, NUMBERS
from longtail.paper.reproduce import reproduce
from longtail.paper.work import Work, released_config, released_networks
from longtail.tasks.tables import Row, markdown_table, show_interval

TABLE = "table-boundary"
SHOWN = ("many", "medium", "few", "balanced", "top1", "nll", "ece")
USUAL = 1.2  # the paper's gamma
GAMMAS = (0.0, 0.3, 0.6, 0.8, 1.0, USUAL, 1.5, 2.0)
FIGURES = ("class-means", "class-accuracy")
# Analyses of the paper that need no further training.
ANALYSES = (
    "table-parameters",
    "table-stage-one",
    "figure-margins",
    "figure-margins-cifar100",
    "figure-confusion",
    "figure-disalign",
    "figure-accuracy",
    "figure-f1",
    "figure-gamma",
)

WHY = """
## Why the numbers differ from the paper's

- **Schedule.** {epochs:g} epochs of batch {batch} ({images:,} images seen), learning rate {lr:g} after {warmup} steps
  of warm-up, {precision} arithmetic; the paper trains 13,000 iterations of batch 512 (6.7 million images, {more:.0f}
  times as many), learning rate 0.05.{longer} Crop, flip, AutoAugment and Cutout are those of its released code; the
  paper does not name them.
- **Validation.** A tenth of every class's training images is held out and never trained on: it chooses tau and gamma
  and fits HALO. The paper trains on all images, and its released code reports the best epoch by test accuracy. This is
  the last epoch.
- **Images.** The pixels here were stored as WebP of quality 95: a published ResNet-32 loses 0.35 points on them.
- **Stage two.** MARC is solved to its optimum on one augmented view; `solver sgd` makes the 2,000 steps of the released
  code on the same. The paper reports one MARC number, which stands in all of its rows here.
- **DisAlign** starts at the identity, with its authors' exponent 1.2; their released classification code starts
  elsewhere.
- tau-norm, logit adjustment and HALO are not in the paper's CIFAR table.
"""


@dataclass(frozen=True)
class Point:
    """A network on the test images: slopes of mean logits and margins over the logarithm of class size, accuracy."""

    logits: float
    margins: float
    balanced: float
    right: np.ndarray


def in_paper(recipe: str, label: str) -> float | None:
    """Per cent in the paper; variants of MARC stand beside its one number."""
    known = NUMBERS[recipe]
    name = "marc" if label.startswith("marc") else label
    return known[name][0] if name in known else None


def numbers_table(recipe: str, rows: list[Row]) -> list[str]:
    """Every score, the difference from Softmax, and the paper's."""
    softmax = in_paper(recipe, "softmax")
    lines = []
    for row in rows:
        paper = in_paper(recipe, row.method)
        gain = "" if paper is None or softmax is None or row.method == "softmax" else f"{paper - softmax:+.1f}"
        scores = [show_interval(SCORES[name], row.scores[name]) for name in SHOWN]
        difference = show_difference(row.against.get("softmax"))
        lines.append([row.title, *scores, difference, "–" if paper is None else f"{paper:.1f}", gain])
    columns = [
        "Method",
        *(SCORES[name].heading for name in SHOWN),
        "vs Softmax",
        "Top-1 in the paper",
        "vs Softmax there",
    ]
    return markdown_table(columns, lines)


def swept(run: Run, root: str | None) -> tuple[dict[str, Point], np.ndarray]:
    """A network on the test images before and at several gammas, and the labels."""
    run = run.using(root=root)
    train, test = run.outputs("train", views=1), run.outputs("test")
    states = {"before": test.rows().read(slice(None)).numpy()}
    states |= {f"gamma {gamma:g}": marc.transform(test) for gamma, marc in MARC().fit_path(train, GAMMAS).items()}
    points = {}
    for name, logits in states.items():
        means = margins(logits, test.labels, weight_norms=test.weight_norms)
        slope, of_margins = (np.polyfit(np.log(run.class_counts), each, 1)[0] for each in (means.logits, means.margins))
        balanced = evaluate(logits, test.labels, run.group_counts).balanced
        points[name] = Point(slope, of_margins, balanced, logits.argmax(1) == test.labels)
    return points, test.labels


def sweep_rows(runs: list[Run], root: str | None) -> list[list[str]]:
    """What gamma does, over all seeds."""
    found = [swept(run, root) for run in runs]
    networks, labels = [points for points, _ in found], found[0][1]
    rows = []
    for name in networks[0]:
        own = [points[name] for points in networks]
        balanced = show_interval(SCORES["balanced"], over_seeds([point.balanced for point in own]))
        usual = np.stack([points[f"gamma {USUAL:g}"].right for points in networks])
        difference = paired_difference(np.stack([point.right for point in own]), usual, labels)
        slopes = [f"{np.mean([getattr(point, each) for point in own]):+.2f}" for each in ("logits", "margins")]
        rows.append([name, *slopes, balanced, show_difference(difference) if name != f"gamma {USUAL:g}" else ""])
    return rows


def write_page(work: Work, recipe: str, out: Path) -> None:
    """The page of a data set: table, trends, pictures, and why it is not the paper's."""
    config, seeds, source = work.configs[recipe], work.seeds[recipe], work.out / recipe
    rows = work.rows(recipe)
    run = work.run(recipe, seeds[0])
    folder = out / recipe
    for name in ("results.csv", "results.json", "table.md", "table.tex"):
        copy_told(source / name, folder / name)
    drawn = replace(ITEMS["figure-margins"], figures=FIGURES, where=recipe, what="drawings")
    pictures = replace(work, name=f"figures-{recipe}", item=drawn, configs={recipe: config}, seeds={recipe: seeds})
    copy_pictures(reproduce(pictures).parent, folder / "figures")
    seen = config.epochs * run.split_sizes["train"]
    names = ", ".join(f"`released:{recipe}-{config.backbone}-seed{seed}`" for seed in seeds)
    lines = [
        f"# {title_of(recipe)}, ResNet-32",
        "",
        *numbers_table(recipe, rows),
        "",
        f"Test images, per cent (but NLL); the test set is balanced, so top-1 is balanced accuracy. {how_sure(seeds)}",
        "All scores, settings chosen and trained numbers: [table.md](table.md). The networks:",
        f"{names} ({describe(config)}).",
        "",
        "## MARC from gamma 0 to 2",
        "",
        "Test images, mean over seeds. Slopes over the logarithm of the class size, per factor e: 0 is flat from head",
        "to tail. The figures show the first seed.",
        "",
        *markdown_table(
            ["MARC", "slope of mean logits", "slope of mean margins", "balanced accuracy", f"minus gamma {USUAL:g}"],
            sweep_rows([work.run(recipe, seed) for seed in seeds], config.root),
        ),
        "",
        *(line for name in FIGURES for line in (f"![{name}](figures/{name}.png)", "")),
    ]
    why = WHY.format(
        epochs=config.epochs,
        batch=config.batch_size,
        images=int(seen),
        lr=config.lr,
        warmup=config.warmup,
        precision=config.precision,
        more=13_000 * 512 / seen,
        longer=longer(),
    )
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in (source / "cells").glob("*.json")]
    commits = ", ".join(sorted({cell["origin"]["commit"] for cell in cells}))
    origin = {**told(), "commit of the cells": commits, "seeds": ", ".join(map(str, seeds))}
    beside = [f"- {key}: {value}" for key, value in origin.items()]
    write_text(folder / "README.md", "\n".join(lines) + "\n" + why + "\n" + "\n".join(beside) + "\n")


def longer() -> str:
    """What a longer training brings, if it was measured."""
    budget, recipe = BUDGETS["resnet32-long"], "cifar10-lt-100"
    rows = {row["method"]: row for row in rows_of(RESULTS / budget.folder / recipe)}
    if not rows:
        return ""
    scores = [
        f"{rows[name]['title']} {100 * rows[name]['scores']['top1']['value']:.1f}" for name in ("softmax", "marc")
    ]
    return (
        f" With\n  {budget.settings['epochs']} epochs, {title_of(recipe)} has {' and '.join(scores)}\n"
        f"  ([measured](../{budget.folder}/{recipe}/README.md))."
    )


def told() -> dict[str, str]:
    """Where the numbers come from, without the folder of CIFAR on this machine."""
    return {**provenance(), "command": "python benchmarks/cifar_lt.py --root data"}


def copy_told(source: Path, target: Path) -> None:
    """Copy a table; the command in it is the one that people can repeat."""
    write_text(target, source.read_text(encoding="utf-8").replace(provenance()["command"], told()["command"]))


def copy_pictures(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for picture in sorted(source.glob("*.png")):
        shutil.copyfile(picture, target / picture.name)


def stand_ins(name: str, known: list[str]) -> list[str]:
    """Recipes of an analysis of which there are networks; where there are none, others that serve as well."""
    item = ITEMS[name]
    if own := [recipe for recipe in item.recipes if recipe in known]:
        return own
    wanted = [recipe.split("-")[0] for recipe in item.recipes]
    close = [recipe for recipe in known if recipe.split("-")[0] in wanted]
    many = [recipe for recipe in known if recipe.startswith("cifar100")]  # in ImageNet-LT's place: many classes
    return (close or many)[:1]


def write_analyses(work: Work, out: Path) -> None:
    """Each analysis as `python -m longtail.paper NAME --released --recipes …` makes it."""
    for name in ANALYSES:
        recipes = stand_ins(name, list(work.configs))
        if not recipes:
            continue
        configs = {recipe: work.configs[recipe] for recipe in recipes}
        seeds = {recipe: work.seeds[recipe] for recipe in recipes}
        page = reproduce(replace(work, name=name, item=ITEMS[name], configs=configs, seeds=seeds))
        folder = out / "analyses" / name
        copy_pictures(page.parent, folder)
        text = page.read_text(encoding="utf-8").replace(provenance()["command"], told()["command"])
        for recipe in recipes:  # the tables that the comparison left stand on the pages of the data sets
            text = text.replace(f"`{recipe}/table.md`", f"[{recipe}](../../{recipe}/table.md)")
        write_text(folder / "README.md", text.replace(" in the folder above this one", ""))
        copy_told(page.parent / "results.json", folder / "results.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of CIFAR (default: unpacked from $LONGTAIL_SHARED or ../shared)")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "results", help="outputs and cells")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the pages go")
    arguments = parser.parse_args()
    root = arguments.root or {str(cifar_root(name)) for name in ("cifar10", "cifar100")}.pop()
    further = [recipe for name in ANALYSES for recipe in ITEMS[name].recipes if recipe.startswith("cifar")]
    networks = released_networks(dict.fromkeys([*CIFAR, *further]))
    configs: dict[str, TrainConfig] = {
        recipe: released_config(own, replace(RECIPES[recipe], root=root), recipe) for recipe, own in networks.items()
    }
    seeds = {recipe: tuple(own) for recipe, own in networks.items()}
    whole = Work(TABLE, ITEMS[TABLE], configs, arguments.work, seeds, (), 1, Display(), released=True)
    tables = [recipe for recipe in CIFAR if recipe in configs]
    work = replace(
        whole,
        configs={recipe: configs[recipe] for recipe in tables},
        seeds={recipe: seeds[recipe] for recipe in tables},
    )
    reproduce(work)
    for recipe in tables:
        write_page(work, recipe, arguments.out)
    write_analyses(whole, arguments.out)
    print((work.folder / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
