"""The results of a comparison as rows, one per method: means over seeds, intervals, differences on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longtail.errors import UserError
from longtail.metrics.intervals import Fallen, Interval, fallen_classes, over_seeds, paired_difference
from longtail.metrics.table import SCORES
from longtail.tasks.cells import Result, read_predictions

FAMILIES = {
    "standard": "Standard training",
    "re-sampling": "Data re-sampling",
    "loss": "Loss function engineering",
    "decision boundary": "Decision boundary adjustment",
    "confidence": "Confidence calibration",
    "network": "Others",
    "own": "Own methods",
}
# Method → heading of the column with the differences from it.
REFERENCES = {"softmax": "vs Softmax", "marc": "vs MARC"}


@dataclass(frozen=True)
class Row:
    """One method: its scores over seeds, and its difference from the references on the same test samples.

    Args:
        method: name for files.
        title: name in tables.
        family: kind of method.
        stage_one: method that trained the network; itself, or the one it calibrates.
        seeds: the seeds.
        scores: mean over the seeds with its interval, by score.
        values: the value of each seed, by score.
        against: difference of balanced accuracy from each reference, and from the stage-one method it calibrates.
        differences: the difference of each seed.
        steps: optimiser steps of stage one.
        images: images that stage one has seen.
        parameters: numbers that stage two trains.
        chosen: settings chosen on validation images, per seed.
        fallen: a calibration's price: classes that it recognises less often than the network it calibrates, over seeds.
    """

    method: str
    title: str
    family: str
    stage_one: str
    seeds: list[int]
    scores: dict[str, Interval | None]
    values: dict[str, list[float | None]]
    against: dict[str, Interval]
    differences: dict[str, list[float]]
    steps: int
    images: int
    parameters: int | None
    chosen: dict[str, list[float]]
    fallen: list[Fallen] = field(default_factory=list)


def summarise(results: Sequence[Result], cells: Path) -> list[Row]:
    """Rows of the table, by family; `cells` is the folder with the predictions."""
    if not results:
        raise UserError("there are no results to summarise")
    _require_comparable(results)
    correct: dict[str, dict[int, np.ndarray]] = {}
    labels = np.zeros(0)
    for result in results:
        file = cells / f"{result['method']}-seed{result['seed']}.npz"
        predictions, truth = read_predictions(file, len(result["class_counts"]))
        if len(labels) and not np.array_equal(truth, labels):
            raise UserError(f"{file} has other test images than the cells before it; delete it, and run this again")
        labels = truth
        correct.setdefault(result["method"], {})[result["seed"]] = predictions == labels
    rows = [_row([one for one in results if one["method"] == method], correct, labels) for method in correct]
    order = list(FAMILIES)
    return sorted(rows, key=lambda row: order.index(row.family) + (0.5 if row.method.startswith("marc") else 0))


def _row(results: Sequence[Result], correct: dict[str, dict[int, np.ndarray]], labels: np.ndarray) -> Row:
    """The row of one method, from its results with every seed; `correct` is method → seed → (N,) correct or not."""
    first, method = results[0], results[0]["method"]
    seeds = [result["seed"] for result in results]
    values = {name: [result["metrics"].get(name) for result in results] for name in SCORES}
    # Cells of earlier versions have no names of classes.
    names = next(filter(None, (result["class_names"] for result in results)), None)
    hits = np.stack([correct[method][seed] for seed in seeds])
    against, differences, fallen = {}, {}, []
    for reference in dict.fromkeys([*REFERENCES, first["stage_one"]]):
        if reference == method or not set(seeds) <= set(correct.get(reference, {})):
            continue
        other = np.stack([correct[reference][seed] for seed in seeds])
        against[reference] = paired_difference(hits, other, labels)
        pairs = zip(hits, other, strict=True)
        differences[reference] = [paired_difference(one, two, labels).value for one, two in pairs]
        if reference == first["stage_one"]:
            classes = names or [str(label) for label in range(len(first["class_counts"]))]
            fallen = fallen_classes(other.mean(0), hits.mean(0), labels, classes)
    return Row(
        method=method,
        title=first["title"],
        family=first["family"],
        stage_one=first["stage_one"],
        seeds=seeds,
        scores={name: _over_seeds(of_seeds) for name, of_seeds in values.items()},
        values=values,
        against=against,
        differences=differences,
        steps=first["steps"],
        images=first["images"],
        parameters=first["parameters"],
        chosen={
            name: [result["chosen"][name] for result in results]
            for name in first["chosen"]
            if all(name in result["chosen"] for result in results)
        },
        fallen=fallen,
    )


def _over_seeds(values: list[float | None]) -> Interval | None:
    measured = [value for value in values if value is not None]
    return over_seeds(measured) if len(measured) == len(values) else None


def _require_comparable(results: Sequence[Result]) -> None:
    """One data set, the same images, and for each stage-one method and seed one network."""
    data = set()
    for result in results:
        config = result["identity"]["config"]
        classes = len(result["class_counts"])
        data.add((f"{config['data']} x {config['imbalance']:g}", config["profile"], classes))
    if len(data) > 1:
        names = ", ".join(sorted({name for name, *_ in data}))
        raise UserError(f"results of different data sets cannot be in one table: {names}")
    first: dict[tuple[object, ...], tuple[str, str]] = {}
    for result in results:
        method, seed = result["method"], result["seed"]
        other, model = first.setdefault((result["stage_one"], seed), (method, result["model"]))
        if model != result["model"]:
            raise UserError(
                f"{other} and {method} of seed {seed} belong to different networks: stage one was trained again in "
                "between; remove the cells of one of them and compare again"
            )
        for split, digest in result["identity"].get("images", {}).items():
            # The test images are the same for every seed; a seed has its own long tail and validation images.
            other, images = first.setdefault((split, seed) if split != "test" else (split,), (method, digest))
            if images != digest:
                raise UserError(
                    f"{other} and {method} of seed {seed} were made on different {split} images; run the comparison "
                    "again, which computes one of them anew"
                )
