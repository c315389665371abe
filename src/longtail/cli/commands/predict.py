"""`longtail predict`: classes and probabilities of new images."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from longtail.cli.parsing import Output, loading, parse
from longtail.errors import UserError
from longtail.files.provenance import WORKERS
from longtail.files.text import table_cell

if TYPE_CHECKING:
    from longtail.runs.folder import Run
    from longtail.runs.prediction import Predicted

HELP = """Predict the classes of new images: names and probabilities of the most probable classes.

The images are resized and normalised as in training. PATHS are images, folders (with all folders below),
text files with a path per line, CSV or Parquet files with a column `path` (relative to the file, or to --root).

Prints a table; --out FILE.csv writes every image as a row, --json prints one document.

Examples:
  longtail predict runs/photos/marc new.jpg
  longtail predict runs/photos/marc new-photos --top 1 --out predicted.csv
  longtail predict runs/photos/halo new-photos --target-prior train
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
    """Class frequencies of the new images: uniform, train, a power of the training prior, or a CSV file with lines
    class,weight. For models calibrated with halo."""
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
    shift = _prior_shift(model.run, options.target_prior) if options.target_prior is not None else None
    predicted = model.predict(
        options.paths,
        root=options.root,
        skip_broken=options.skip_broken,
        workers=options.workers,
        display=display,
    )
    if shift is not None:
        weighted = predicted.probabilities * np.exp(shift - shift.max())
        predicted = replace(predicted, probabilities=weighted / weighted.sum(1, keepdims=True))
    for path in predicted.left_out:
        display.line(f"skipped, because it cannot be read: {path}")
    if options.out:
        write_text(options.out, _csv(predicted, options.top))
        display.line(f"written: {options.out} ({len(predicted):,} images)")
    else:
        display.table(prediction_table(predicted, options.top, display.out.width))
    options.print_json(_document(predicted, options))
    return 0


def _prior_shift(run: Run, target_prior: float | str) -> np.ndarray:
    """(K,) what another target prior adds to the logits: its logarithm minus that of the calibration's."""
    from longtail.posthoc.priors import check_target_prior, log_target
    from longtail.tasks.calibration import read_calibration

    settings = read_calibration(run.folder, model=run.model_identity)[0].settings if run.calibration else {}
    inner = settings.get("method")  # the settings of the first step, with --then temperature
    settings = inner if isinstance(inner, dict) else settings
    if "target_prior" not in settings:
        raise UserError(f"--target-prior needs a model calibrated with halo, and {run.folder} is none")
    log_prior = np.log(run.class_counts / run.class_counts.sum())
    logarithms = []
    for prior in (target_prior, settings["target_prior"]):
        check_target_prior(prior)
        logarithms.append(log_target(prior, log_prior, run.class_names))
    if not np.isfinite(logarithms[1]).all():
        raise UserError(f"{run.folder} was calibrated for a target prior with 0 for a class; calibrate it again")
    return np.asarray(logarithms[0] - logarithms[1])


def _csv(predicted: Predicted, top: int) -> str:
    best = predicted.top(top)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ranks = range(1, len(best[0]) + 1)
    writer.writerow(["path", *(f"{name}_{rank}" for rank in ranks for name in ("class", "probability"))])
    for path, classes in zip(predicted.sources, best, strict=True):
        cells = (cell for name, value in classes for cell in (table_cell(name), f"{value:.6f}"))
        writer.writerow([table_cell(path), *cells])
    return text.getvalue()


def _document(predicted: Predicted, options: Predict) -> dict[str, object]:
    images = [
        {"path": path, "classes": [{"name": name, "probability": value} for name, value in classes]}
        for path, classes in zip(predicted.sources, predicted.top(options.top), strict=True)
    ]
    return {"run": str(options.run), "images": images, "left_out": list(predicted.left_out)}
