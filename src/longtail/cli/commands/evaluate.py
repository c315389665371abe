"""`longtail evaluate`: scores of a trained model on one split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from longtail.cli.parsing import Output, RunData, parse

HELP = """Score a trained model on one split of its data.

Prints top-1 and balanced accuracy, many / medium / few-shot accuracy (classes with more than 100, 20 to 100, fewer
than 20 training images), macro F1, calibration error and the accuracy of each class. Writes all of these and the
confusion matrix to RUN/metrics-SPLIT.json.

--test-profile forward:50 scores a long-tailed subset: the classes with most training images have most test images, the
largest 50 times as many as the smallest; backward:50 is the reverse. Published factors are 2, 5, 10, 25 and 50 (LADE,
SADE). --target-prior estimate takes the class frequencies from the images, known from their labels.

Examples:
  longtail evaluate runs/digits --all
  longtail evaluate runs/c10 --split validation --root /data --json
  longtail evaluate runs/c10/halo --test-profile backward:50 --target-prior estimate
"""


@dataclass(frozen=True)
class Evaluate(Output, RunData):
    """Which model, on what."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or of a calibrated model."""
    split: Literal["test", "validation", "train"] | None = None
    """Which images: test or, if there are none, validation; do not choose settings on test images."""
    test_profile: str | None = None
    """Score a long-tailed subset of the images: forward:N or backward:N."""
    target_prior: float | str | None = None
    """Class frequencies to be right for: uniform, train, a power of the training prior, a CSV file with lines
    class,weight, estimate or known. For models calibrated with halo."""
    costs: str | None = None
    """A CSV file of what mistakes cost, as for calibrate: the mean cost per image is printed."""
    device: str = "auto"
    """auto, cpu, cuda, …"""
    all: bool = False
    """Print every class, not only the first and last of many."""


def main(words: list[str]) -> int:
    options = parse(Evaluate, words, "longtail evaluate", HELP)
    from longtail.report.terminal import metrics_table
    from longtail.runs.folder import Run
    from longtail.tasks.evaluate import evaluate_run

    display = options.display()
    costs = None
    if options.costs is not None:  # refused before anything is computed
        import numpy as np

        from longtail.posthoc.costs import mean_cost, read_costs  # slow to import: scikit-learn

        costs = read_costs(options.costs, Run.open(options.run).class_names)
    metrics, run, path = evaluate_run(
        options.run,
        options.split,
        test_profile=options.test_profile,
        target_prior=options.target_prior,
        root=options.root,
        device=options.device,
        workers=options.workers,
        display=display,
    )
    display.table(
        metrics_table(
            metrics,
            run.class_names,
            run.group_counts,
            split=path.stem.removeprefix("metrics-"),
            every_class=options.all,
        )
    )
    if path.stem.startswith("metrics-validation") and run.calibration:
        from longtail.tasks.calibration import read_calibration  # slow to import: scikit-learn

        described = read_calibration(run.folder)[0]
        if described.fitted_on.used_validation:
            display.line(
                f"{described.title} was fitted or chosen on the validation images: its scores there are higher than on "
                "new images"
            )
    more = {}
    if costs is not None:
        labels, predicted = np.repeat(metrics.cells[:, :2], metrics.cells[:, 2], axis=0).T
        more["cost"] = mean_cost(costs, predicted, labels, run.class_counts)
        display.line(f"cost per image {more['cost']:.4g}, classes as frequent as in training")
    display.line(f"written: {path}")
    options.print_json({**metrics.to_dict(), **more})
    return 0
