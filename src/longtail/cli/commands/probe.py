"""`longtail probe`: a linear head for long-tailed classes, from embeddings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from longtail.cli.parsing import Output, loading, parse
from longtail.files.text import percent

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.posthoc.probe.result import Estimate
    from longtail.tasks.probe import ProbeScores

HELP = """Fit a linear head for long-tailed classes on embeddings of a frozen, pretrained network.

EMBEDDINGS is a .npz with features (N, D) and labels (N,), a .npy with --labels, a .safetensors, a .parquet
with a column of lists and a column of labels, or a .csv whose columns are features and one label. Labels are
numbers or names. The network must not have been trained on these samples; otherwise use `longtail calibrate`.

Prints what was chosen, and the accuracy on samples that the head had not seen, with an interval; no sample has
to be held out for it. A test file with labels is scored beside plain logistic regression.

The folder gets head.safetensors (weight and bias of one linear layer), probe.json (classes, what was chosen,
scores) and, for a test file, predictions.csv.

Examples:
  longtail probe embeddings.npz --out head
  longtail probe embeddings.npz --test test.npz --out head
  longtail probe features.npy --labels labels.npy --target-prior train --out head
  longtail probe birds.parquet --label-column species --out birds-head
"""
SHOWN = 5  # classes that gain most, and that lose most


@dataclass(frozen=True)
class Probe(Output):
    """Which embeddings, and for which class frequencies."""

    embeddings: Annotated[Path, tyro.conf.Positional]
    """Embeddings and labels: .npz, .npy, .safetensors, .parquet, .csv."""
    out: Path
    """Folder of the result."""
    test: Path | None = None
    """Embeddings to predict, of the same kinds of files; scored if they have labels."""
    labels: Path | None = None
    """Labels of EMBEDDINGS, if they are in another file: .npy, or one label per line."""
    test_labels: Path | None = None
    """The same for --test."""
    label_column: str | None = None
    """Column or array of the labels, if it is not called label, labels, y or target."""
    target_prior: str = "uniform"
    """Class frequencies to be right for: uniform, train, a power of the training prior, or a CSV file with lines
    class,weight."""
    overwrite: bool = False
    """Replace the folder if it exists."""


def main(words: list[str]) -> int:
    options = parse(Probe, words, "longtail probe", HELP)
    with loading():
        from longtail.outputs.embeddings import read_embeddings
        from longtail.tasks.probe import fit_probe, named_scores

    train = read_embeddings(options.embeddings, options.labels, label_column=options.label_column)
    test = None
    if options.test is not None:
        test = read_embeddings(options.test, options.test_labels, label_column=options.label_column)
    scores = fit_probe(
        train,
        options.out,
        test=test,
        target_prior=_number_or_text(options.target_prior),
        overwrite=options.overwrite,
        display=options.display(),
    )
    _print(options, scores)
    tests = {name: metrics.to_dict() for name, metrics in named_scores(scores).items()}
    options.print_json({"out": str(options.out), "result": asdict(scores.probe.result_), "test": tests})
    return 0


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _print(options: Probe, scores: ProbeScores) -> None:
    from longtail.report.terminal import comparison_table
    from longtail.tasks.probe import named_scores

    display, result = options.display(), scores.probe.result_
    towards = "the variances of the features" if result.scaled else "equal variances"
    display.line(
        f"chosen in {result.folds} folds: ridge {result.ridge:.3g}, covariance shrunk by {result.shrinkage:g} towards "
        f"{towards}, scale {result.scale:.3f}; {result.seconds:.1f} s, {result.passes} passes"
    )
    display.table(_estimates(result.balanced, result.natural, result.held_out))
    if rows := named_scores(scores):
        display.table(comparison_table("test", rows))
    changes = scores.changes()
    for heading, some in (("gain", changes[:SHOWN]), ("lose", changes[::-1][:SHOWN])):
        moved = [row for row in some if (row[3] > row[2]) == (heading == "gain")]
        if moved:
            text = ", ".join(f"{name} ({n}) {percent(old)} → {percent(new)}" for name, n, old, new in moved)
            display.line(f"classes that {heading} most against logistic regression (training samples): {text}")
    if scores.left_out:
        display.line(f"logistic regression was left out: {scores.left_out}")
    display.line(f"written: {options.out} ({', '.join(sorted(path.name for path in options.out.glob('[!.]*')))})")


def _estimates(balanced: Estimate | None, natural: Estimate | None, held_out: int) -> Table | str:
    """Scores of held-out samples, if any class has two samples."""
    from rich.table import Table

    if balanced is None or natural is None:
        return "no class has two samples, so nothing could be held out to estimate the accuracy"
    table = Table("classes", title=f"estimated on {held_out:,} samples, each scored by a head that had not seen it")
    for heading in ("accuracy", "95 % interval", "NLL", "ECE"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, score in (("equally frequent", balanced), ("as in training", natural)):
        interval = f"{percent(score.low)} to {percent(score.high)}"
        table.add_row(name, percent(score.accuracy), interval, f"{score.nll:.3f}", percent(score.ece))
    return table
