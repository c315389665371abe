"""Scoring a run on one of its splits, and the table people read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table

from longtail.data.loading import resident
from longtail.display import Display
from longtail.files import write_json
from longtail.metrics import SHOTS, Metrics, shot_groups
from longtail.runs import Run
from longtail.scoring import score
from longtail.world import join

SHOWN_CLASSES = 20


def evaluate_run(
    folder: Path | str,
    split: str = "test",
    *,
    root: str | None = None,
    device: str = "auto",
    workers: int = 4,
    display: Display | None = None,
) -> tuple[Metrics, Run, Path]:
    """Metrics of a finished run on a split, the run, and the JSON file they were written to."""
    with join(device) as world:
        run = Run.open(folder)
        model = run.load_model()
        splits = run.splits(root)
        world.require_alike(model=run.model_hash(), split=split)
        images = resident(splits.split(split), world.device)
        _, clean = run.transforms(splits)
        network = model.to(world.device)
        metrics = score(network, images, clean, world, run.class_counts, workers=workers, display=display)
        path = run.folder / f"metrics-{split}.json"
        if world.is_main:
            skipped = len(images) - metrics.samples
            write_json(path, {"split": split, "model": run.model_hash(), "skipped": skipped, **metrics.to_dict()})
        world.barrier()
    return metrics, run, path


def percent(value: float | None) -> str:
    """A share as people read it.

    >>> percent(0.4567), percent(None)
    ('45.7', 'none')
    """
    return "none" if value is None else f"{100 * value:.1f}"


def metrics_table(metrics: Metrics, class_names: list[str], class_counts: np.ndarray) -> Group:
    """Overall scores, then the classes from head to tail (the ends only, if they are many)."""
    overall = comparison_table(f"{metrics.samples} images", {"": metrics})
    return Group(overall, _class_table(metrics, class_names, class_counts))


def comparison_table(title: str, rows: dict[str, Metrics]) -> Table:
    """Scores of several models, one row each."""
    table = Table("", title=title)
    for name in ("top-1", "balanced", *SHOTS, "macro F1", "ECE"):
        table.add_column(name, justify="right")
    for name, metrics in rows.items():
        shots = (metrics.many, metrics.medium, metrics.few)
        scores = (metrics.top1, metrics.balanced, *shots, metrics.macro_f1, metrics.ece)
        table.add_row(name, *(percent(score) for score in scores))
    return table


def _class_table(metrics: Metrics, class_names: list[str], class_counts: np.ndarray) -> Table:
    table = Table("class", title="classes, head to tail")
    for name in ("training images", "shots", "accuracy", "F1"):
        table.add_column(name, justify="right")
    groups = shot_groups(class_counts)
    order = np.argsort(-class_counts, kind="stable")
    ends = len(order) > SHOWN_CLASSES
    shown = [*order[: SHOWN_CLASSES // 2], None, *order[-SHOWN_CLASSES // 2 :]] if ends else list(order)
    for label in shown:
        if label is None:
            table.add_row("…", "…", "…", "…", "…")
            continue
        shots = next(name for name in SHOTS if groups[name][label])
        scores = percent(metrics.per_class[label]), percent(metrics.f1_per_class[label])
        table.add_row(class_names[label], str(class_counts[label]), shots, *scores)
    return table
