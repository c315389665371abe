"""`longtail distribution`: how long is the tail?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from longtail.cli.parsing import Output, parse
from longtail.files.text import command_on
from longtail.recipes import RECIPES

HELP = f"""Show the class distribution of a data set before any training.

DATA is a recipe ({", ".join(RECIPES)}), an image folder (one folder per class, or train/,
val/ and test/ with one folder per class each), a list file with a path and a label per line, a CSV
file of paths and labels, or Parquet files of images or paths and labels (one, or a folder of them).
For a recipe, the long tail is made as in training. Validation images that training holds out count as
training images, here and wherever classes are grouped into many, medium and few.

Examples:
  longtail distribution digits-lt
  longtail distribution cifar10-lt-100 --root data --plot classes.png
  longtail distribution photos --json
  longtail distribution birds.csv --root photos --label-column species
"""


@dataclass(frozen=True)
class Distribution(Output):
    """What to show."""

    data: Annotated[str, tyro.conf.Positional]
    """A recipe, a folder, or a list, CSV or Parquet file."""
    root: str | None = None
    """Folder of the data set (recipes), or folder that paths in a list are relative to (default: that of the list)."""
    path_column: str | None = None
    """Column of the paths (or images) in a CSV or Parquet file, if it is not called path, image, file, …"""
    label_column: str | None = None
    """Column of the labels in a CSV or Parquet file, if it is not called label, class, target, …"""
    plot: Path | None = None
    """Also draw the distribution into this PNG file."""


def main(words: list[str]) -> int:
    options = parse(Distribution, words, "longtail distribution", HELP)
    from longtail.report import require_packages
    from longtail.report.terminal import distribution_table
    from longtail.tasks.class_distribution import distribution

    if options.plot:
        require_packages("--plot", "matplotlib")
    result = distribution(
        options.data, options.root, path_column=options.path_column, label_column=options.label_column
    )
    display = options.display()
    display.table(distribution_table(result))
    if options.plot:
        from longtail.report.figures import write_distribution

        write_distribution(result, options.plot)
        display.line(f"written: {options.plot}")
    display.line(f"next: {command_on('train', options.data, options.root, '--out', f'runs/{Path(options.data).stem}')}")
    options.print_json(result.to_dict())
    return 0
