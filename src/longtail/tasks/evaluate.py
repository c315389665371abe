"""Scoring a run on one of its splits, and the table people read."""

from __future__ import annotations

from pathlib import Path

from longtail.core.files import write_json
from longtail.core.progress import Display
from longtail.data.loading import resident
from longtail.distributed.world import join
from longtail.metrics.scores import Metrics
from longtail.runs.folder import Run
from longtail.runs.score import score


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
