"""`longtail predict`: classes and probabilities of new images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from longtail.cli.parsing import Output, parse
from longtail.config import WORKERS
from longtail.errors import UserError
from longtail.files.text import csv_text

if TYPE_CHECKING:
    from longtail.runs.prediction import Predicted

HELP = """Predict the classes of new images: names and probabilities of the most probable classes.

The images are resized and normalised as in training. PATHS are images, folders (with all folders below),
text files with a path per line, CSV or Parquet files with a column `path` (relative to the file, or to --root).

--target-prior estimate estimates the class frequencies of the images, as a power of the training prior (30 images at
least). --coverage 0.9 adds a set of classes to each image that contains the true class with this probability, in the
mean over classes. Both need a model calibrated with held-out images.

Examples:
  longtail predict runs/photos/marc new.jpg
  longtail predict runs/photos/marc new-photos --top 1 --out predicted.csv
  longtail predict runs/photos/halo new-photos --target-prior train
  longtail predict runs/photos/halo new-photos --target-prior estimate
  longtail predict runs/photos/halo new-photos --coverage 0.9 --out sets.csv
  longtail predict runs/photos/marc list.txt --root /data --json
"""


@dataclass(frozen=True)
class Predict(Output):
    """Which model, on what."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or of a calibrated model."""
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Images, folders, lists of files."""
    top: int = 3
    """Classes to print per image."""
    target_prior: float | str | None = None
    """Class frequencies of the new images: uniform, train, a power of the training prior, a CSV file with lines
    class,weight, or estimate, from the images. For models calibrated with halo."""
    coverage: float | None = None
    """Add prediction sets: the share of images whose set contains the true class, such as 0.9."""
    out: Path | None = None
    """Write a CSV file: path, then name and probability of the most probable classes."""
    overwrite: bool = False
    """Replace the file if it exists."""
    root: str | None = None
    """Folder that the paths in lists are relative to (default: the folder of the list)."""
    skip_broken: bool = False
    """Leave out images that cannot be read, instead of stopping."""
    device: str = "auto"
    """auto, cpu, cuda, …"""
    workers: int = WORKERS
    """Processes that decode images."""


def main(words: list[str]) -> int:
    options = parse(Predict, words, "longtail predict", HELP)
    if options.top < 1:
        raise UserError(f"--top must be positive, not {options.top}")
    if options.out and options.out.exists() and not options.overwrite:
        raise UserError(f"{options.out} exists already; choose another --out or replace it with --overwrite")
    from longtail.files.atomic import write_text
    from longtail.report.terminal import prediction_table
    from longtail.runs.prediction import load

    display, model = options.display(), load(options.run, device=options.device)
    deployment = None
    if options.target_prior is not None or options.coverage is not None:
        from longtail.tasks.deployment import Deployment  # slow to import

        deployment = Deployment.of(model.run)
        deployment.require(options.target_prior, options.coverage)
    predicted = model.predict(
        options.paths,
        root=options.root,
        skip_broken=options.skip_broken,
        workers=options.workers,
        display=display,
    )
    estimated: dict[str, object] = {}
    if deployment is not None:
        predicted, estimated, lines = deployment.apply(predicted, options.target_prior, options.coverage)
        for line in lines:
            display.line(line)
    for path in predicted.left_out:
        display.line(f"skipped, because it cannot be read: {path}")
    if options.out:
        write_text(options.out, _csv(predicted, options.top))
        display.line(f"written: {options.out} ({len(predicted):,} images)")
    else:
        display.table(prediction_table(predicted, options.top, display.out.width))
    options.print_json({**_document(predicted, options), **estimated})
    return 0


def _csv(predicted: Predicted, top: int) -> str:
    best, sets = predicted.top(top), predicted.set_names()
    columns = (f"{name}_{rank}" for rank in range(1, len(best[0]) + 1) for name in ("class", "probability"))
    header = ["path", *columns, *(["set_size", "set"] if sets else [])]
    rows = (
        [path, *(cell for name, value in classes for cell in (name, f"{value:.6f}"))]
        + ([len(sets[index]), "|".join(sets[index])] if sets else [])
        for index, (path, classes) in enumerate(zip(predicted.sources, best, strict=True))
    )
    return csv_text(header, rows)


def _document(predicted: Predicted, options: Predict) -> dict[str, object]:
    images: list[dict[str, object]] = [
        {"path": path, "classes": [{"name": name, "probability": value} for name, value in classes]}
        for path, classes in zip(predicted.sources, predicted.top(options.top), strict=True)
    ]
    for image, names in zip(images, predicted.set_names(), strict=False):
        image["set"] = names
    return {"run": str(options.run), "images": images, "left_out": list(predicted.left_out)}
