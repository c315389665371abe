"""`longtail diagnose`: is this model long-tail biased?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from longtail.cli.parsing import Output, RunData, parse, refuse
from longtail.errors import UserError
from longtail.files.text import command_on

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.outputs.record import Outputs
    from longtail.tasks.diagnose import Diagnosis

HELP = """Is this model long-tail biased, and would calibration help?

Measures on held-out images how mean margins and logits depend on class size. Then tries post-hoc methods on
images that their fit has not used, and prints how much balanced accuracy the one that `longtail calibrate` takes
gains, with a confidence interval, and what to do, in two sentences.

For a run folder: uses the validation split unless another is named. For a file of saved logits (see
`longtail calibrate`): give held-out samples; the file needs class_counts of the training set, or give
the training logits with --train.

Examples:
  longtail diagnose runs/digits
  longtail diagnose held-out.npz --train train.npz
"""


@dataclass(frozen=True)
class RunOptions(RunData):
    """Only for a run folder."""

    split: Literal["validation", "test"] = "validation"
    """Which held-out images."""


@dataclass(frozen=True)
class FileOptions:
    """Only for saved logits."""

    train: Path | None = None
    """Logits and labels of the training images."""
    label_column: str | None = None
    """Column of the labels in a CSV file, if it is not called label, labels, y or target."""


@dataclass(frozen=True)
class Diagnose(Output):
    """What to diagnose."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or a file of held-out logits and labels."""
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)
    file: tyro.conf.OmitArgPrefixes[FileOptions] = field(default_factory=FileOptions)


def main(words: list[str]) -> int:
    options = parse(Diagnose, words, "longtail diagnose", HELP)
    from longtail.runs.folder import Run
    from longtail.tasks.diagnose import diagnose, write_diagnosis

    outputs = _run_outputs(options) if options.source.is_dir() else _file_outputs(options)
    diagnosis = diagnose(*outputs)
    if options.source.is_dir():
        write_diagnosis(Run.open(options.source), diagnosis)  # the report shows it
    show(options, diagnosis)
    return 0


def _run_outputs(options: Diagnose) -> tuple[Outputs, Outputs | None]:
    """Outputs of the held-out and of the training images of a run."""
    from longtail.runs.folder import Run

    refuse(options.file, "saved logits", options.source, "a run")
    run, split = Run.open(options.source), options.run.split
    if split not in run.split_sizes:
        raise UserError(f"{options.source} has no {split} split; name another with --split")
    run = run.using(root=options.run.root, workers=options.run.workers, display=options.display())
    return run.outputs(split), run.outputs("train", views=1)


def _file_outputs(options: Diagnose) -> tuple[Outputs, Outputs | None]:
    """Held-out and training outputs of files."""
    from longtail.outputs.readers import read_held_out, read_outputs

    refuse(options.run, "run folders", options.source, "saved logits")
    column, train_file = options.file.label_column, options.file.train
    if train_file is None:
        return read_outputs(options.source, split="held-out", need_counts=True, label_column=column), None
    train = read_outputs(train_file, label_column=column)
    return read_held_out(options.source, "held-out", train, column), train


def show(options: Diagnose, diagnosis: Diagnosis) -> None:
    """Print the scores, the expected gain of each method, and the advice."""
    from longtail.methods import POSTHOC_METHODS
    from longtail.metrics.intervals import fallen_text
    from longtail.metrics.table import SCORES
    from longtail.report.terminal import numbers_table

    before = diagnosis.before
    signs = [
        (f"rank correlation of class size and mean {name[:-1]}", f"{value:+.2f}")
        for name, value in before.correlation.items()
    ]
    scores = [(score.heading, score.show(getattr(before.metrics, score.name))) for score in SCORES.values()]
    display = options.display()
    samples = f"{diagnosis.samples} {diagnosis.split} samples"
    display.table(numbers_table(samples, ("sign", "value"), [*signs, *scores]))
    display.table(_trial_table(diagnosis))
    if diagnosis.fallen:
        title = POSTHOC_METHODS[diagnosis.nearest].title
        display.line(f"{title} lowers the accuracy of these classes: {fallen_text(diagnosis.fallen)}")
    display.out.print(diagnosis.sentences(), markup=False)
    if diagnosis.advice is not None and options.source.is_dir():
        display.line(f"next: {command_on('calibrate', options.source, options.run.root, *diagnosis.advice)}")
        if diagnosis.method == "halo" and diagnosis.split != "validation":
            display.line(
                "calibrate fits HALO on validation images (longtail train --validation 0.1), not on the "
                f"{diagnosis.split} images: the gain can differ"
            )
    elif diagnosis.advice is not None and options.file.train:
        column = ["--label-column", options.file.label_column] if options.file.label_column else []
        words = ["--validation", str(options.source), *column, *diagnosis.advice, "--out", "calibrated"]
        display.line(f"next: {command_on('calibrate', options.file.train, None, *words)}")
    options.print_json(diagnosis.to_dict())


def _trial_table(diagnosis: Diagnosis) -> Table:
    from longtail.methods import POSTHOC_METHODS, candidate_title
    from longtail.metrics.intervals import show_difference
    from longtail.metrics.table import SCORES
    from longtail.report.terminal import numbers_table

    rows = [
        (
            candidate_title(tried.method) + (" ←" if tried.method == diagnosis.method else ""),
            f"{tried.log_likelihood:.4f}",
            "" if tried.method == "softmax" else show_difference(tried.gain),
            SCORES["natural"].show(tried.natural),
        )
        for tried in diagnosis.tried
    ]
    headings = ("method", "log-\nlikelihood", "gain in balanced\naccuracy (points)", "top-1 at\ntraining prior")
    tail = f"{POSTHOC_METHODS[diagnosis.nearest].title}, the tail half of the classes: "
    return numbers_table(
        "what calibration would bring, on samples that no fit has seen",
        headings,
        rows,
        "← what longtail calibrate takes; a higher log-likelihood is better\n"
        f"{tail}{show_difference(diagnosis.tail_gain)}",
    )
