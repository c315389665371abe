"""`longtail predict`: classes and probabilities of new images."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from longtail.cli.loading import loading
from longtail.cli.parsing import Output, parse
from longtail.core.machine import WORKERS
from longtail.core.text import table_cell
from longtail.errors import UserError

if TYPE_CHECKING:
    from longtail.runs.prediction import Predicted

HELP = """Predict the classes of new images: names and probabilities of the most probable classes.

The images are resized and normalised as in training. PATHS are images, folders (with all folders below),
text files with a path per line, CSV or Parquet files with a column `path` (relative to the file, or to --root).

Prints a table; --out FILE.csv writes every image as a row, --json prints one document.

Examples:
  longtail predict runs/photos/marc new.jpg
  longtail predict runs/photos/marc new-photos --top 1 --out predicted.csv
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
    """Classes to show per image."""
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


def main(arguments: list[str]) -> int:
    options = parse(Predict, arguments, "predict", HELP)
    if options.top < 1:
        raise UserError(f"--top must be positive, not {options.top}")
    if options.out and options.out.exists() and not options.overwrite:
        raise UserError(f"{options.out} exists already; choose another --out or replace it with --overwrite")
    with loading():
        from longtail.core.files import write_text
        from longtail.report.terminal import prediction_table
        from longtail.runs.prediction import load

    display = options.display()
    found = load(options.run, device=options.device).predict(
        options.paths,
        root=options.root,
        skip_broken=options.skip_broken,
        workers=options.workers,
        display=display,
    )
    for path in found.left_out:
        display.line(f"skipped, because it cannot be read: {path}")
    if options.out:
        write_text(options.out, _csv(found, options.top))
        display.line(f"written: {options.out} ({len(found):,} images)")
    else:
        display.table(prediction_table(found, options.top))
    options.print_json(_document(found, options))
    return 0


def _csv(found: Predicted, top: int) -> str:
    best = found.top(top)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = range(1, len(best[0]) + 1)
    writer.writerow(["path", *(f"{name}_{place}" for place in columns for name in ("class", "probability"))])
    for path, classes in zip(found.sources, best, strict=True):
        cells = (cell for name, value in classes for cell in (table_cell(name), f"{value:.6f}"))
        writer.writerow([table_cell(path), *cells])
    return text.getvalue()


def _document(found: Predicted, options: Predict) -> dict[str, object]:
    images = [
        {"path": path, "classes": [{"name": name, "probability": value} for name, value in classes]}
        for path, classes in zip(found.sources, found.top(options.top), strict=True)
    ]
    return {"run": str(options.run), "images": images, "left_out": list(found.left_out)}
