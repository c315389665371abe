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
        values: the seeds' own values, by score.
        against: difference of balanced accuracy from each reference, and from the stage-one method it calibrates.
        differences: the seeds' own differences.
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
    _require_one_data_set(results)
    _require_one_network(results)
    correct: dict[str, dict[int, np.ndarray]] = {}
    labels = np.zeros(0)
    for result in results:
        file = cells / f"{result['method']}-seed{result['seed']}.npz"
        predictions, truth = read_predictions(file, len(result["class_counts"]))
        if len(labels) and not np.array_equal(truth, labels):
            raise UserError(f"{file} has other test images than the cells before it; delete it, and run this again")
        labels = truth
        correct.setdefault(result["method"], {})[result["seed"]] = predictions == labels
    rows = [_row([own for own in results if own["method"] == method], correct, labels) for method in correct]
    order = list(FAMILIES)
    return sorted(rows, key=lambda row: order.index(row.family) + (0.5 if row.method.startswith("marc") else 0))


def _row(own: Sequence[Result], correct: dict[str, dict[int, np.ndarray]], labels: np.ndarray) -> Row:
    first, method = own[0], own[0]["method"]
    values = {name: [result["metrics"].get(name) for result in own] for name in SCORES}
    hits = np.stack([correct[method][result["seed"]] for result in own])
    against, differences, fallen = {}, {}, []
    for reference in dict.fromkeys([*REFERENCES, first["stage_one"]]):
        theirs = correct.get(reference, {})
        if reference == method or not all(result["seed"] in theirs for result in own):
            continue
        other = np.stack([theirs[result["seed"]] for result in own])
        against[reference] = paired_difference(hits, other, labels)
        pairs = zip(hits, other, strict=True)
        differences[reference] = [paired_difference(one, two, labels).value for one, two in pairs]
        if reference == first["stage_one"]:
            fallen = fallen_classes(other.mean(0), hits.mean(0), labels, _class_names(own))
    return Row(
        method=method,
        title=first["title"],
        family=first["family"],
        stage_one=first["stage_one"],
        seeds=[result["seed"] for result in own],
        scores={name: _over_seeds(known) for name, known in values.items()},
        values=values,
        against=against,
        differences=differences,
        steps=first["steps"],
        images=first["images"],
        parameters=first["parameters"],
        chosen={name: [result["chosen"][name] for result in own] for name in first["chosen"] if _all_chose(own, name)},
        fallen=fallen,
    )


def _class_names(own: Sequence[Result]) -> list[str]:
    """Names of the classes, from any seed: cells of earlier versions have none."""
    known = next((names for result in own if (names := result["class_names"])), None)
    return known or [str(label) for label in range(len(own[0]["class_counts"]))]


def _all_chose(own: Sequence[Result], name: str) -> bool:
    return all(name in result["chosen"] for result in own)


def _over_seeds(values: list[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return over_seeds(known) if len(known) == len(values) else None


def _require_one_data_set(results: Sequence[Result]) -> None:
    def data(result: Result) -> tuple[object, ...]:
        config = result["identity"]["config"]
        return config["data"], config["profile"], config["imbalance"], len(result["class_counts"])

    if len({data(result) for result in results}) > 1:
        found = sorted({f"{data(result)[0]} x {data(result)[2]:g}" for result in results})
        raise UserError(f"results of different data sets cannot be in one table: {', '.join(found)}")


def _require_one_network(results: Sequence[Result]) -> None:
    """Post-hoc methods on one stage-one method and seed are compared on one network."""
    known: dict[tuple[str, int], Result] = {}
    for result in results:
        first = known.setdefault((result["stage_one"], result["seed"]), result)
        if first["model"] != result["model"]:
            raise UserError(
                f"{first['method']} and {result['method']} of seed {result['seed']} belong to different networks: "
                "stage one was trained again in between; remove the cells of one of them and compare again"
            )
