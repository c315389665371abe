"""Put finished runs into released/: weights, card and a record without paths, each checked.

    python benchmarks/release.py runs/boundary/cifar10-lt-100/runs/softmax-seed0 --root data

A run is released only if its images are found again (the digests of all splits are compared, so that the held-out
images can be told from those the network has seen) and the copy loads with the same identity and scores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from common import HERE

from longtail import Run, export
from longtail.files.atomic import write_text
from longtail.metrics.table import SCORES
from longtail.runs.record import RELEASED as PREFIX
from longtail.runs.record import RELEASED_FILES as FILES
from longtail.tasks.evaluate import evaluate_run
from longtail.training.plan import Plan

RELEASED = HERE.parent / "released"
LARGEST = 2_000_000  # bytes of weights
USUAL_EPOCHS = 60
SHOWN = ("many", "medium", "few", "balanced", "nll", "ece")


def name_of(run: Run) -> str:
    """cifar10-lt-100-resnet32-seed0; method, options and length stand in it if they are not the usual ones."""
    config = run.config
    method = "" if config.method == "softmax" else f"-{config.method}"
    options = ("" if config.mix == "none" else f"-{config.mix}") + ("" if config.defer is None else "-defer")
    length = "" if config.epochs == USUAL_EPOCHS else f"-{config.epochs:g}epochs" if config.epochs else "-paper"
    return f"{config.data}-lt-{config.imbalance:g}-{config.backbone}{method}{options}{length}-seed{config.seed}"


def require_its_images(run: Run, root: str) -> None:
    """The data at hand are those that the network was trained, and is to be tested, on."""
    splits = run.using(root=root).splits
    for name, known in run.record.data.splits.items():
        if splits.split(name).digest != known.digest:
            sys.exit(f"{run.folder}: the {name} images at hand are not those of the run")


def require_no_paths(folder: Path) -> None:
    text = (folder / "run.json").read_text(encoding="utf-8")
    if found := re.search(r'"/[^"]*"|"[A-Za-z]:\\[^"]*"', text):
        sys.exit(f"{folder}: its record holds a path of this machine: {found[0]}")


def release(source: Path, root: str, out: Path) -> Path:
    """Check a run and write its folder below released/."""
    run = Run.open(source)
    if run.calibration:
        sys.exit(f"{source} is calibrated; release the run it came from")
    require_its_images(run, root)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "run"  # scores are written beside the weights, not into somebody's run
        copy.mkdir()
        for name in ("run.json", "model.safetensors", "metrics.jsonl"):
            shutil.copyfile(source / name, copy / name)
        scores, _, _ = evaluate_run(copy, "test", root=root, device="cpu")
        target = out / name_of(run)
        export(copy, target, "safetensors", overwrite=True)
        again = Path(temporary) / "again"
        shutil.copytree(target, again)
        if evaluate_run(again, "test", root=root, device="cpu")[0].to_dict() != scores.to_dict():
            sys.exit(f"{target} does not score as {source} does")
    kept = Run.open(target)
    if kept.model_identity != run.model_identity or kept.record.data != run.record.data:
        sys.exit(f"{target} is not the network of {source}")
    require_no_paths(target)
    if (size := (target / "model.safetensors").stat().st_size) > LARGEST:
        sys.exit(f"{target} weighs {size:,} bytes, more than {LARGEST:,}")
    if more := {path.name for path in target.iterdir()} - set(FILES):
        sys.exit(f"{target} holds more than a released network: {', '.join(sorted(more))}")
    return target


def card_scores(card: Path) -> list[str]:
    """The row of the test split in a card."""
    headings = [score.heading for score in SCORES.values()]
    (row,) = (line for line in card.read_text(encoding="utf-8").splitlines() if line.startswith("| test |"))
    found = dict(zip(headings, [cell.strip() for cell in row.strip("| ").split("|")][2:], strict=True))
    return [found[SCORES[name].heading] for name in SHOWN]


def write_list(out: Path) -> None:
    """released/README.md: what there is."""
    lines = [
        "# Released networks",
        "",
        "Trained by `longtail train` on long-tailed CIFAR and written by `benchmarks/release.py`; the README of each",
        "is its card. They are not in the installed package. `released:NAME` stands wherever a run is taken:",
        "",
        "```console",
        f"longtail calibrate {PREFIX}NAME --root data    # in a clone; elsewhere set LONGTAIL_RELEASED to this folder",
        "```",
        "",
        'In Python `longtail.load("released:NAME")` predicts; nothing is written.',
        "",
        f"| name | images seen | {' | '.join(SCORES[name].heading for name in SHOWN)} |",
        "|---|---:|" + "---:|" * len(SHOWN),
    ]
    for folder in sorted(out.glob("*/run.json")):
        name, run = folder.parent.name, Run.open(folder.parent)
        plan = Plan.of(run.config, run.split_sizes["train"])
        scores = " | ".join(card_scores(folder.parent / "README.md"))
        lines.append(f"| [{name}]({name}/README.md) | {plan.images_at(plan.steps):,} | {scores} |")
    lines += [
        "",
        "Scores of the test split before any calibration, per cent (but NLL).",
        "",
        "**The images.** The networks were trained on CIFAR images that had been stored as WebP of quality 95, in",
        "another order than in the original files. With the original files predictions and `evaluate --split test`",
        "work; what needs training or held-out images is refused by their digests: the two could not be told apart.",
        "On your own images, `longtail.calibrate(longtail.load(NAME).network, loader)` asks for no record.",
    ]
    write_text(out / "README.md", "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--root", required=True, help="folder of CIFAR")
    parser.add_argument("--out", type=Path, default=RELEASED, help="folder of released networks")
    arguments = parser.parse_args()
    for source in arguments.runs:
        print(release(source, arguments.root, arguments.out))
    write_list(arguments.out)


if __name__ == "__main__":
    main()
