"""Scores a run on one of its splits."""

from __future__ import annotations

from pathlib import Path

from longtail.distributed import join
from longtail.files.atomic import write_json
from longtail.files.progress import QUIET, Display
from longtail.files.provenance import WORKERS
from longtail.files.records import FORMAT
from longtail.metrics.scores import Metrics
from longtail.runs.folder import Run
from longtail.runs.outputs import score_loader


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
        run = Run.open(folder).using(world, root=root, workers=workers, display=display)
        if split is None:
            split = run.scored_split or "test"
            if split != "test" and world.is_main:
                display.line(f"there are no test images: scored on {run.split_sizes[split]:,} {split} images")
        world.require_alike(model=run.model_identity, split=split)
        loader = run.loader(split)
        metrics = score_loader(run.network, loader, run.group_counts, display)
        path = run.folder / f"metrics-{split}.json"
        if world.is_main:
            skipped = len(loader.images) - metrics.samples
            origin = {"format": FORMAT, "model": run.model_identity, "split": split, "skipped": skipped}
            write_json(path, {**origin, **metrics.to_dict()})
        world.barrier()
    return metrics, run, path
