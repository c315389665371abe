"""MARC's gamma after each stage-one method: does training that balances want a smaller one?

The networks are those of `systems.py`, with the outputs that it leaves in their run folders.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, how_sure, title_of, write_results
from systems import BUDGETS, ORDER

from longtail import MARC, Outputs
from longtail.methods import TRAIN_METHODS
from longtail.metrics.intervals import paired_difference, show_difference

FOLDER = RESULTS / BUDGETS["resnet8"].folder
GAMMAS: tuple[Any, ...] = (0.8, 1.0, 1.2, "auto")
TRAIN, VALIDATION, TEST = (f"{name}.safetensors" for name in ("train-views1", "validation", "test"))


def hits(folder: Path) -> dict[Any, np.ndarray]:
    """Which test images are recognised, unchanged (None) and with each gamma; the labels are under "labels"."""
    train, validation, test = (Outputs.open(folder / name) for name in (TRAIN, VALIDATION, TEST))
    found = {None: test.rows().read(np.arange(len(test))).argmax(1).numpy() == test.labels}
    for gamma in GAMMAS:
        marc = MARC(gamma).fit(train, validation=validation if gamma == "auto" else None)
        found[gamma] = np.asarray(marc.transform(test)).argmax(1) == test.labels
    return {**found, "labels": test.labels}


def row(recipe: str, method: str, networks: list[dict[Any, np.ndarray]]) -> dict[str, Any]:
    labels = networks[0]["labels"]

    def all_of(gamma: Any) -> np.ndarray:
        return np.stack([network[gamma] for network in networks])

    own = np.mean([all_of(None)[:, labels == label].mean() for label in np.unique(labels)])
    gains = {gamma: paired_difference(all_of(gamma), all_of(None), labels) for gamma in GAMMAS}
    shown = {f"gamma {gamma}": show_difference(gain) for gamma, gain in gains.items()}
    return {"data": title_of(recipe), "stage one": TRAIN_METHODS[method].title, "alone": f"{100 * own:.1f}", **shown}


def main() -> None:
    networks: dict[tuple[str, str], dict[int, dict[Any, np.ndarray]]] = defaultdict(dict)
    for run in sorted(FOLDER.glob("*/runs/*-seed*")):
        method, _, seed = run.name.rpartition("-seed")
        networks[run.parent.parent.name, method][int(seed)] = hits(run / "outputs")
    if not networks:
        sys.exit(f"no runs below {FOLDER}: benchmarks/systems.py trains them")
    order = sorted(networks, key=lambda key: (len(key[0]), key[0], ORDER.index(key[1])))
    seeds = sorted({tuple(sorted(of_seed)) for of_seed in networks.values()}, key=len)
    write_results(
        "gamma_after",
        "MARC's gamma after each stage-one method",
        [row(*key, list(networks[key].values())) for key in order],
        "ResNet-8, the networks of [every system at one budget](systems/cifar10-lt-100/README.md). Balanced accuracy "
        "on the test images, and what MARC changes (points, 95 % interval). Classes weigh n to the power of minus "
        "gamma: 1 makes them equal, 1.2 (the paper's) makes the tail heavier; auto chooses on the validation images. "
        + how_sure(seeds[0]),
        seeds=", ".join(map(str, seeds[0])),
    )


if __name__ == "__main__":
    main()
