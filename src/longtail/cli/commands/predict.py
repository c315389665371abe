"""`longtail predict`: classes and probabilities of new images."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from longtail.cli.parsing import Output, loading, parse
from longtail.errors import UserError
from longtail.files.provenance import WORKERS
from longtail.files.text import table_cell

if TYPE_CHECKING:
    from longtail.runs.folder import Run
    from longtail.runs.prediction import Predicted
    from longtail.tasks.deployment import Deployment

HELP = """Predict the classes of new images: names and probabilities of the most probable classes.

The images are resized and normalised as in training. PATHS are images, folders (with all folders below),
text files with a path per line, CSV or Parquet files with a column `path` (relative to the file, or to --root).

Prints a table; --out FILE.csv writes every image as a row, --json prints one document.

--target-prior estimate finds the class frequencies of the images from the images themselves, as a power of the
training prior (30 images at least). --coverage 0.9 adds a set of classes to each image that contains the true class
with this probability, in the mean over classes. Both need a model calibrated with held-out images.

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
    with loading():
        from longtail.files.atomic import write_text
        from longtail.report.terminal import prediction_table
        from longtail.runs.prediction import load

    display, model = options.display(), load(options.run, device=options.device)
    change = (
        _Change.of(model.run, options) if options.target_prior is not None or options.coverage is not None else None
    )
    predicted = model.predict(
        options.paths,
        root=options.root,
        skip_broken=options.skip_broken,
        workers=options.workers,
        display=display,
    )
    estimated: dict[str, object] = {}
    if change is not None:
        predicted, lines, estimated = change.applied(predicted)
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


@dataclass(frozen=True)
class _Change:
    """What --target-prior and --coverage do to predictions; refused before anything is predicted."""

    deployment: Deployment
    target_prior: float | str | None
    coverage: float | None

    @classmethod
    def of(cls, run: Run, options: Predict) -> _Change:
        from longtail.tasks.deployment import ESTIMATE, Deployment

        deployment = Deployment.of(run)
        if options.coverage is not None:
            deployment.require_sets().thresholds(options.coverage)
        if options.target_prior == ESTIMATE:
            deployment.prior_estimator()
        elif options.target_prior is not None:
            deployment.shift_to(options.target_prior)
        return cls(deployment, options.target_prior, options.coverage)

    def applied(self, predicted: Predicted) -> tuple[Predicted, list[str], dict[str, object]]:
        """The predictions, what to say of them, and the estimate of class frequencies for JSON."""
        from longtail.tasks.deployment import ESTIMATE, change_line, estimate_lines, moved

        lines: list[str] = []
        estimated: dict[str, object] = {}
        before, target_prior = predicted.probabilities, self.target_prior
        if self.coverage is not None:
            predicted = replace(predicted, sets=self.deployment.sets(before, self.coverage))
            lines.append(self.deployment.require_sets().promise(self.coverage))
        if target_prior == ESTIMATE:
            estimate = self.deployment.prior_estimator().estimate(before)
            lines += estimate_lines(estimate, predicted.class_names)
            shown = {name: getattr(estimate, name) for name in ("power", "low", "high", "samples", "fits")}
            estimated, target_prior = {"target_prior": shown}, estimate.power
        if target_prior is not None:
            predicted = replace(predicted, probabilities=moved(before, self.deployment.shift_to(target_prior)))
            labels = (before.argmax(1), predicted.probabilities.argmax(1))
            lines += [change_line(*labels, predicted.class_names)] if estimated else []
        return predicted, lines, estimated


def _csv(predicted: Predicted, top: int) -> str:
    best = predicted.top(top)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ranks = range(1, len(best[0]) + 1)
    sets = predicted.set_names()
    columns = (f"{name}_{rank}" for rank in ranks for name in ("class", "probability"))
    writer.writerow(["path", *columns, *(["set_size", "set"] if sets else [])])
    for index, (path, classes) in enumerate(zip(predicted.sources, best, strict=True)):
        cells = (cell for name, value in classes for cell in (table_cell(name), f"{value:.6f}"))
        own = [len(sets[index]), table_cell("|".join(sets[index]))] if sets else []
        writer.writerow([table_cell(path), *cells, *own])
    return text.getvalue()


def _document(predicted: Predicted, options: Predict) -> dict[str, object]:
    images: list[dict[str, object]] = [
        {"path": path, "classes": [{"name": name, "probability": value} for name, value in classes]}
        for path, classes in zip(predicted.sources, predicted.top(options.top), strict=True)
    ]
    for image, names in zip(images, predicted.set_names(), strict=False):
        image["set"] = names
    return {"run": str(options.run), "images": images, "left_out": list(predicted.left_out)}
