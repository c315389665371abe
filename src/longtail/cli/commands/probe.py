"""`longtail probe`: a linear head for long-tailed classes, from embeddings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from longtail.cli.parsing import Output, parse, refuse
from longtail.config import WORKERS
from longtail.errors import UserError
from longtail.files.text import command_on, percent

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.posthoc.probe.result import Estimate
    from longtail.tasks.probe import ProbeScores

HELP = """Fit a linear head for long-tailed classes on a frozen, pretrained network.

EMBEDDINGS: a .npz with features (N, D) and labels (N,), a .npy with --labels, a .safetensors, a .parquet with
a column of lists and a column of labels, or a .csv whose columns are features and one label. Labels are numbers
or names. The folder gets head.safetensors (weight and bias of one linear layer), probe.json (classes, what was
chosen, scores) and, for a test file, predictions.csv.

IMAGES with --backbone: whatever `longtail train` takes (a recipe, an image folder, a list, CSV or Parquet file). The
embeddings are computed once and kept in $LONGTAIL_CACHE. The folder becomes a run, as by `longtail train --train head`,
which predict, evaluate, report, export and calibrate take.

The network must not have been trained on these samples; otherwise use `longtail calibrate`.

Prints what was chosen, and the accuracy on samples that the head had not seen, with an interval; no sample has
to be held out for it. Test samples with labels are scored beside plain logistic regression.

Examples:
  longtail probe embeddings.npz --out head
  longtail probe embeddings.npz --test test.npz --out head
  longtail probe features.npy --labels labels.npy --target-prior train --out head
  longtail probe birds.parquet --label-column species --out birds-head
  longtail probe photos --backbone timm:vit_small_patch14_dinov2 --out runs/photos
  longtail probe photos --backbone resnet50 --weights resnet50.pth --out runs/photos
"""
SHOWN = 5  # classes that gain most, and that lose most


@dataclass(frozen=True)
class FileOptions:
    """Only for embeddings."""

    test: Path | None = None
    """Embeddings to predict, of the same kinds of files; scored if they have labels."""
    labels: Path | None = None
    """Labels of EMBEDDINGS, if they are in another file: .npy, or one label per line."""
    test_labels: Path | None = None
    """The same for --test."""


@dataclass(frozen=True)
class ImageOptions:
    """Only for images."""

    backbone: str | None = None
    """Network that gives the features, as in `longtail train`: resnet50, timm:NAME, hf:NAME, …"""
    weights: Path | None = None
    """Its weights, a .safetensors or .pth file."""
    image_size: int | None = None
    """Images read from files are resized to this side (pixels)."""
    root: str | None = None
    """Folder of the data set, or the one that paths in a list are relative to."""
    device: str = "auto"
    """auto, cpu, cuda, …"""
    workers: int = WORKERS
    """Processes that decode images read from files."""


@dataclass(frozen=True)
class Probe(Output):
    """Which samples, and for which class frequencies."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EMBEDDINGS|IMAGES")]
    """A file of embeddings and labels; with --backbone, images."""
    out: Path
    """Folder of the result."""
    label_column: str | None = None
    """Column or array of the labels, if it is not called label, labels, y or target."""
    target_prior: float | str = "uniform"
    """Class frequencies to be right for: uniform, train, a power of the training prior, or a CSV file with lines
    class,weight."""
    overwrite: bool = False
    """Replace the folder if it exists."""
    file: tyro.conf.OmitArgPrefixes[FileOptions] = field(default_factory=FileOptions)
    images: tyro.conf.OmitArgPrefixes[ImageOptions] = field(default_factory=ImageOptions)


def main(words: list[str]) -> int:
    options = parse(Probe, words, "longtail probe", HELP)
    scores = _on_file(options, options.file) if options.images.backbone is None else _on_images(options, options.images)
    _print(options, scores)
    tests = {name: metrics.to_dict() for name, metrics in scores.test.items()}
    options.print_json({"out": str(options.out), "result": asdict(scores.result), "test": tests})
    return 0


def _on_file(options: Probe, given: FileOptions) -> ProbeScores:
    from longtail.outputs.readers import read_embeddings
    from longtail.tasks.probe import fit_probe

    source = Path(options.source)
    if source.is_dir():
        raise UserError(f"{source} is a folder: if it holds images, name the network that embeds them (--backbone)")
    refuse(options.images, "images (--backbone)", source, "a file of embeddings")
    train = read_embeddings(source, given.labels, label_column=options.label_column)
    test = None
    if given.test is not None:
        test = read_embeddings(given.test, given.test_labels, label_column=options.label_column)
    return fit_probe(
        train,
        options.out,
        test=test,
        target_prior=options.target_prior,
        overwrite=options.overwrite,
        display=options.display(),
    )


def _on_images(options: Probe, given: ImageOptions) -> ProbeScores:
    from longtail.tasks.probe import probe_images
    from longtail.training.defaults import recipe_for

    refuse(options.file, "files of embeddings", Path(options.source), "a set of images (--backbone)")
    values = {**vars(given), "weights": given.weights and str(given.weights), "label_column": options.label_column}
    settings = {name: value for name, value in values.items() if value is not None}
    config = recipe_for(options.source, **{**settings, "validation": 0.0})
    return probe_images(
        config,
        options.out,
        target_prior=str(options.target_prior),
        overwrite=options.overwrite,
        display=options.display(),
    )


def _print(options: Probe, scores: ProbeScores) -> None:
    from longtail.report.terminal import comparison_table

    display, result = options.display(), scores.result
    of_classes = " growing with the root of class sizes" if result.power else ""
    towards = "the variances of the features" if result.scaled else "equal variances"
    display.line(
        f"chosen in {result.folds} folds: ridge {result.ridge:.3g}{of_classes}, covariance shrunk by "
        f"{result.shrinkage:g} towards {towards}, scale {result.scale:.3f}; {result.seconds:.1f} s, "
        f"{result.passes} passes"
    )
    for note in result.notes():
        display.line(note)
    display.table(_estimates(result.balanced, result.natural, result.held_out))
    if scores.test:
        display.table(comparison_table("test", scores.test))
    for heading, some in (("gain", scores.changes[:SHOWN]), ("lose", scores.changes[::-1][:SHOWN])):
        moved = [row for row in some if (row[3] > row[2]) == (heading == "gain")]
        if moved:
            text = ", ".join(f"{name} ({n}) {percent(old)} → {percent(new)}" for name, n, old, new in moved)
            display.line(f"classes that {heading} most against logistic regression (training samples): {text}")
    if scores.left_out:
        display.line(f"logistic regression was left out: {scores.left_out}")
    display.line(f"written: {options.out} ({', '.join(sorted(path.name for path in options.out.glob('[!.]*')))})")
    if options.images.backbone is not None:
        display.line(f"next: {command_on('evaluate', options.out, options.images.root)}")
    else:
        display.line(
            "logits are features @ weight.T + bias, of the classes in probe.json; --test NEW (without labels) predicts "
            "new embeddings"
        )


def _estimates(balanced: Estimate | None, natural: Estimate | None, held_out: int) -> Table | str:
    """Scores of held-out samples, if any class has two samples."""
    from longtail.report.terminal import numbers_table

    if balanced is None or natural is None:
        return "no class has two samples, so nothing could be held out to estimate the accuracy"
    rows = [
        (
            name,
            percent(score.accuracy),
            f"{percent(score.low)} to {percent(score.high)}",
            f"{score.nll:.3f}",
            percent(score.ece),
        )
        for name, score in (("equally frequent", balanced), ("as in training", natural))
    ]
    title = f"estimated on {held_out:,} samples, each scored by a head that had not seen it"
    return numbers_table(title, ("classes", "accuracy", "95 % interval", "NLL", "ECE"), rows)
