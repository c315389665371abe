"""Scores a run on one of its splits."""

from __future__ import annotations

from pathlib import Path

from longtail.core.files import write_json
from longtail.core.formats import FORMAT
from longtail.core.machine import WORKERS
from longtail.core.progress import QUIET, Display
from longtail.data.loading import resident
from longtail.distributed.world import join
from longtail.metrics.scores import Metrics
from longtail.runs.folder import Run
from longtail.runs.score import score


def evaluate_run(
    folder: Path | str,
    split: str | None = None,
    *,
    root: str | None = None,
    device: str = "auto",
    workers: int = WORKERS,
    display: Display = QUIET,
) -> tuple[Metrics, Run, Path]:
    """Metrics of a finished run on a split, the run, and the JSON file they were written to.

    Without a split: on test images or, if there are none, on validation images.
    """
    with join(device) as world:
        run = Run.open(folder)
        if split is None:
            split = run.scored_split or "test"
            if split != "test" and world.is_main:
                display.line(f"there are no test images: scored on {run.split_sizes[split]:,} {split} images")
        model = run.load_model()
        splits = run.splits(root)
        world.require_alike(model=run.model_identity, split=split)
        _, clean = run.transforms(splits)
        images = resident(
            run.images(split, splits),
            clean,
            world.device,
            cache_gb=run.config.cache_gb,
            workers=workers,
            display=display if world.is_main else QUIET,
        )
        network = model.to(world.device)
        metrics = score(network, images, clean, world, run.group_counts, workers=workers, display=display)
        path = run.folder / f"metrics-{split}.json"
        if world.is_main:
            skipped = len(images) - metrics.samples
            known = {"format": FORMAT, "model": run.model_identity, "split": split, "skipped": skipped}
            write_json(path, {**known, **metrics.to_dict()})
        world.barrier()
    return metrics, run, path
