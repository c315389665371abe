"""Every system at one budget on long-tailed CIFAR, alone and with MARC and HALO on top.

Stage-one methods take equal optimiser steps on ResNet-8; each finished network is calibrated at once. The cells stay
in docs/results/systems/RECIPE/cells (the runs beside them are not kept in the repository), so that the same command
goes on after an interruption and later ones add seeds:

    OMP_NUM_THREADS=1 python benchmarks/systems.py --root data --seeds 0 1 2
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from common import RESULTS

from longtail import RECIPES, TrainConfig, compare
from longtail.core.progress import Display
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS

FOLDER = RESULTS / "systems"
DATA = ("cifar10-lt-100", "cifar100-lt-100")
ON_TOP = ("marc", "halo")
# One stream of images first: a method with several takes as many times longer.
ORDER = sorted(TRAIN_METHODS, key=lambda name: len(TRAIN_METHODS[name].samplers))
EPOCHS = 20


def config_of(recipe: str, root: str | None = None) -> TrainConfig:
    """The recipe at a budget that two cores manage."""
    return replace(
        RECIPES[recipe],
        root=root,
        backbone="resnet8",
        epochs=EPOCHS,
        iterations=None,
        batch_size=128,
        lr=0.1,
        warmup=200,
        precision="bf16",
        evaluate_every=EPOCHS,
        checkpoint_every=2,
    )


def entries(first: str) -> list[str]:
    """A stage-one method and what is put on top of it: on Softmax, every post-hoc method."""
    on_top = POSTHOC_METHODS if first == "softmax" else ON_TOP
    return [first, *(f"{first}+{name}" for name in on_top)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder of CIFAR")
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--methods", nargs="+", default=ORDER, choices=ORDER)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    display = Display()
    for seed in arguments.seeds:
        for recipe in arguments.data:
            config = config_of(recipe, arguments.root)
            for first in arguments.methods:
                compare(config, entries(first), arguments.out / recipe, seeds=(seed,), display=display)


if __name__ == "__main__":
    main()
