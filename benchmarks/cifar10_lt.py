"""CIFAR-10-LT 100 with ResNet-32: Softmax and the decision-boundary family, beside the paper's numbers.

Trains what is not trained yet (resumable: the same command goes on), compares, draws the report, and
leaves tables, figures and page in docs/results/cifar10-lt-100/.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import RESULTS, cifar_root

from longtail import MARC, RECIPES, Run, compare, evaluate_logits, margins
from longtail.config import describe
from longtail.core.progress import Display
from longtail.extraction.run import Extractor
from longtail.report.build import report_run
from longtail.report.paper import NUMBERS
from longtail.tasks.tables import summarise, write_tables

METHODS = ("softmax", "tau-norm", "crt", "lws", "disalign", "logit-adjustment", "marc", "marc:solver=sgd")
PAPER = {method: numbers[0] for method, numbers in NUMBERS["cifar10-lt-100"].items()}
PAPER["marc-solver=sgd"] = PAPER["marc"]
TRENDS = (0.0, 0.3, 0.6, 0.9, 1.2)

DIFFERENCES = """
## Why the numbers differ from the paper's

- **Schedule.** {epochs:g} epochs of batch {batch} ({images:,} images seen), learning rate {lr:g} after {warmup}
  steps of warm-up; the paper trains 13,000 iterations of batch 512 (6.7 million images, {more:.0f} times as many),
  learning rate 0.05. The augmentation (crop, flip, AutoAugment, Cutout) is that of its released code; the
  paper does not name it.
- **Validation.** A tenth of every class's training images is held out to choose tau and never trained on; the paper
  trains on all of them, and its released code reports the best epoch by test accuracy. We report the last epoch.
- **Images.** The pixels here were stored as WebP of quality 95, not as the original bitmaps: a published ResNet-32
  loses 0.35 points on them.
- **Stage two.** MARC `exact` solves the problem on one augmented view; `sgd` makes the 2,000 steps of the released code
  on the same. The paper reports one MARC number, which stands in both rows.
- **DisAlign** does as well as MARC here and worse in the paper. Ours starts at the identity, with its authors' exponent
  1.2; their released classification code starts elsewhere (`longtail.posthoc.disalign` says where).
- tau-norm and logit adjustment are not in the paper's CIFAR table. tau-norm chooses tau on the validation split, where
  tail classes have few images: {taus} for the seeds, hence its wide intervals.
"""


def trend_rows(run: Run) -> list[str]:
    """How mean logits and margins go with class size on the test images, before and at several gammas."""
    train = Extractor(run).outputs("train", views=1)
    test = Extractor(run).outputs("test")
    states = {"before": test.rows().read(slice(None)).numpy()}
    states |= {f"gamma {gamma:g}": marc.transform(test) for gamma, marc in MARC().fit_path(train, TRENDS).items()}
    rows = []
    for name, logits in states.items():
        means = margins(logits, test.labels, weight_norms=test.weight_norms)
        slopes = [np.polyfit(np.log(run.class_counts), values, 1)[0] for values in (means.logits, means.margins)]
        balanced = evaluate_logits(logits, test.labels, run.class_counts).balanced
        rows.append(f"| {name} | {slopes[0]:+.2f} | {slopes[1]:+.2f} | {100 * balanced:.1f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the comparison: runs and cells")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=100)
    arguments = parser.parse_args()
    root = str(cifar_root())
    config = replace(
        RECIPES["cifar10-lt-100"],
        root=root,
        epochs=arguments.epochs,
        iterations=None,
        batch_size=128,
        lr=0.1,
        warmup=450,
        evaluate_every=5,
        checkpoint_every=1,
    )
    display = Display()
    results = compare(config, METHODS, arguments.out, seeds=arguments.seeds, display=display)
    folder = RESULTS / "cifar10-lt-100"
    rows = summarise(results, arguments.out / "cells")
    write_tables(rows, results, folder, describe(config))
    shutil.rmtree(folder / "figures", ignore_errors=True)
    run = Run.open(arguments.out / "runs" / f"softmax-seed{arguments.seeds[0]}")
    page, summary = report_run([run], folder, root=root, display=display)
    seen = config.epochs * run.split_sizes["train"]
    differences = DIFFERENCES.format(
        epochs=config.epochs,
        batch=config.batch_size,
        images=int(seen),
        lr=config.lr,
        warmup=config.warmup,
        more=13_000 * 512 / seen,
        taus=", ".join(f"{result['chosen']['tau']:g}" for result in results if result["method"] == "tau-norm"),
    )
    lines = [
        "# CIFAR-10-LT 100, ResNet-32",
        "",
        "| Method | Overall, here | Overall, in the paper |",
        "|---|---:|---:|",
    ]
    for row in rows:
        paper = f"{PAPER[row.method]:.1f}" if row.method in PAPER else "–"
        lines.append(f"| {row.title} | {100 * row.scores['balanced'].value:.1f} | {paper} |")
    seeds = ", ".join(map(str, arguments.seeds))
    lines += ["", f"Balanced test accuracy, per cent; seeds: {seeds}. With shots and intervals: [table.md](table.md)."]
    before, after = summary.before.correlation, summary.after.correlation
    trends = trend_rows(run)
    lines += [
        "",
        "## Margins and logits from head to tail",
        "",
        f"On the held-out {summary.split} images (seed {arguments.seeds[0]}) the rank correlation of class size "
        f"with the mean logit is {before['logits']:+.2f} before calibration and {after['logits']:+.2f} after, with the "
        f"mean margin {before['margins']:+.2f} and {after['margins']:+.2f}.",
        "",
        "Before calibration both fall from head to tail, as the paper observes. After it the paper finds them flatter. "
        "Here that holds for the logits; the trend of the margins is small before and turns round, because gamma 1.2 "
        "weighs tail classes by more than balance asks for. A weaker gamma gives flat margins, and a lower accuracy:",
        "",
        "| | slope of mean logits | slope of mean margins | balanced accuracy |",
        "|---|---:|---:|---:|",
        *trends,
        "",
        "Slopes over the logarithm of the class size, per factor e.",
        "",
        "![Mean logits and margins](figures/class-means.png)",
        "",
        "![Class-wise accuracy](figures/class-accuracy.png)",
        "",
        f"The whole report: [{page.name}]({page.name}).",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n" + differences, encoding="utf-8")
    print(json.dumps({row.method: row.scores["balanced"].value for row in rows}))


if __name__ == "__main__":
    main()
