"""`longtail diagnose`: is this model long-tail biased?"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from longtail.cli.loading import loading
from longtail.cli.parsing import Output, parse, refuse
from longtail.core.machine import WORKERS
from longtail.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.outputs.record import Outputs
    from longtail.tasks.diagnose import Diagnosis

HELP = """Is this model long-tail biased, and would calibration help?

Measures on held-out images how mean margins and logits depend on class size. Then tries the methods that
`longtail calibrate --method auto` chooses from, and prints how much balanced accuracy the chosen one gains,
with a confidence interval, and what to do, in two sentences.

For a run folder: uses the validation split unless another is named. For a file of saved logits (see
`longtail calibrate`): give held-out samples; the file needs class_counts of the training set, or give
the training logits with --train.

Examples:
  longtail diagnose runs/digits
  longtail diagnose held-out.npz --train train.npz
"""


@dataclass(frozen=True)
class Diagnose(Output):
    """What to diagnose."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or a file of held-out logits and labels."""
    split: Literal["validation", "test"] = "validation"
    """Run: which held-out images."""
    train: Path | None = None
    """File: logits and labels of the training images."""
    root: str | None = None
    """Run: folder of the data set, if it has moved since training."""
    workers: int = WORKERS
    """Run: processes that decode images read from files."""


def main(arguments: list[str]) -> int:
    options = parse(Diagnose, arguments, "diagnose", HELP)
    with loading():
        from longtail.tasks.diagnose import diagnose

    if options.source.is_dir():
        refuse(options, ("train",), options.source, "a run")
        held_out, train = _of_run(options)
    else:
        held_out, train = _of_file(options)
    diagnosis = diagnose(held_out, train)
    show(options, diagnosis)
    return 0


def _of_run(options: Diagnose) -> tuple[Outputs, Outputs | None]:
    from longtail.extraction.run import Extractor
    from longtail.runs.folder import Run

    run = Run.open(options.source)
    if options.split not in run.split_sizes:
        raise UserError(f"{options.source} has no {options.split} split; name another with --split")
    extractor = Extractor(run, root=options.root, workers=options.workers, display=options.display())
    return extractor.outputs(options.split), extractor.outputs("train", views=1)


def _of_file(options: Diagnose) -> tuple[Outputs, Outputs | None]:
    from longtail.outputs.readers import read_outputs

    held_out = read_outputs(options.source, split="held-out", need_counts=options.train is None)
    if options.train is None:
        return held_out, None
    train = read_outputs(options.train)
    return held_out.with_counts_of(train), train


def show(options: Diagnose, diagnosis: Diagnosis) -> None:
    """Print a diagnosis: scores, what each method would bring, and what to do."""
    from rich.table import Table

    from longtail.methods import POSTHOC_METHODS
    from longtail.metrics.intervals import fallen_text
    from longtail.metrics.table import SCORES

    metrics = diagnosis.before.metrics
    table = Table("sign", title=f"{diagnosis.samples} {diagnosis.split} samples")
    table.add_column("value", justify="right")
    for name, value in diagnosis.before.correlation.items():
        table.add_row(f"rank correlation of class size and mean {name[:-1]}", f"{value:+.2f}")
    for score in SCORES.values():
        table.add_row(score.heading, score.show(getattr(metrics, score.name)))
    display = options.display()
    display.table(table)
    display.table(_tried(diagnosis))
    if diagnosis.fallen:
        title = POSTHOC_METHODS[diagnosis.nearest].title
        display.line(f"{title} lowers the accuracy of these classes: {fallen_text(diagnosis.fallen)}")
    display.out.print(diagnosis.sentences(), markup=False)
    if diagnosis.helps and options.source.is_dir():
        display.line(f"to do it: longtail calibrate {shlex.quote(str(options.source))} --method {diagnosis.method}")
        if diagnosis.method == "halo" and diagnosis.split != "validation":
            display.line(
                "calibrate fits HALO on validation images (longtail train --validation 0.1), not on the "
                f"{diagnosis.split} images: the gain can differ"
            )
    options.print_json(diagnosis.to_dict())


def _tried(diagnosis: Diagnosis) -> Table:
    from rich.table import Table

    from longtail.methods import POSTHOC_METHODS
    from longtail.metrics.table import SCORES
    from longtail.report.terminal import ARROW, gain_text

    table = Table("method", title="what calibration would bring, on samples that no fit has seen")
    for heading in ("log-\nlikelihood", "gain in balanced\naccuracy (points)", "top-1 at\ntraining prior"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tried in diagnosis.tried:
        mark = " ←" if tried.name == diagnosis.method else ""
        gain = "" if tried.name == "softmax" else gain_text(tried.gain)
        price = SCORES["natural"].show(tried.natural)
        table.add_row(f"{tried.title}{mark}", f"{tried.likelihood:.4f}", gain, price)
    tail = POSTHOC_METHODS[diagnosis.nearest].title
    table.caption = f"{ARROW}\n{tail}, the tail half of the classes: {gain_text(diagnosis.tail_gain)}"
    return table
