"""`longtail train`: stage one."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from longtail.cli.parsing import loading, parse
from longtail.cli.settings import Training, first_reading, read_settings, starting_point
from longtail.config import TrainConfig
from longtail.data.sources import SOURCES
from longtail.errors import EXIT_SIGNAL, Interrupted, UserError, number
from longtail.files.text import clock, command_on
from longtail.launch import number_of
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from longtail.training.defaults import Found

PROGRAM = "longtail train"
LAYOUTS = "\n".join(f"  {name:<14}{source.layout}" for name, source in SOURCES.items())
HELP = f"""Train a classifier on long-tailed images (stage one).

longtail train DATA --out FOLDER [OPTIONS]

DATA is a recipe ({", ".join(RECIPES)}), or the path
of your images: a folder with a folder per class (or train/, val/, test/ with a folder per class each),
a list with a path and a label per line, or a CSV or Parquet file (columns path and label; see --label-column).

A recipe sets every option below. For a path, the settings are chosen from the size and number of the images,
and printed; `longtail train DATA --help` shows them. A TOML file given with --config FILE replaces
settings, and so do options.

Instead of DATA you can give --data KIND --root FOLDER; each kind expects these files below --root:
{LAYOUTS}

Examples:
  longtail train digits-lt --out runs/digits
  longtail train photos --out runs/photos
  longtail train photos --out runs/photos --minutes 10
  longtail train photos --out runs/photos --weights resnet50.pth --image-size 224 --epochs 20
  longtail train photos --out runs/dinov2 --backbone timm:vit_small_patch14_dinov2 --image-size 224 --train lora
  longtail train labels.csv --root photos --out runs/photos --overwrite
  longtail train cifar10-lt-100 --root data --download --out runs/c10 --epochs 60 --batch-size 128
  longtail train --out runs/c10 --resume
"""


@dataclass(frozen=True, kw_only=True)
class Train(Training):
    """What to train, and where to write it."""

    out: Path
    """Folder of the run; made if it does not exist."""
    resume: bool = False
    """Continue from the checkpoint in the folder; the result is bit for bit that of an uninterrupted run."""
    overwrite: bool = False
    """Replace the run in the folder."""
    download: bool = False
    """Fetch CIFAR from its page first if it is not below --root."""
    minutes: float | None = None
    """For images at a path: choose network, image size and epochs so that training takes about so long here."""
    tracker: tuple[str, ...] = ()
    """Also log the scores of each evaluation to: tensorboard, mlflow, wandb, csv."""


def main(words: list[str]) -> int:
    first = first_reading(Train, words, PROGRAM, out=Path())
    with _joined(first.settings.device):
        start, found = starting_point(first, words, PROGRAM)
        options = parse(Train, words, PROGRAM, HELP, default=Train(settings=start, out=tyro.MISSING))
        if options.minutes is not None:
            given = {word.partition("=")[0] for word in words} | {f"--{name}" for name in read_settings(first)}
            options = replace(options, settings=_in_time(options, options.minutes, found, given))
        return _train(options, found)


def _in_time(options: Train, minutes: float, found: Found | None, given: set[str]) -> TrainConfig:
    """Settings with which training takes about so many minutes here; what was given stays."""
    if found is None or options.resume or number_of("WORLD_SIZE", 1) > 1:
        raise UserError(
            "--minutes chooses settings for new runs in one process on images at a path; give --epochs instead"
        )
    number("minutes", minutes, above=0)
    with loading():
        from longtail.backbones.library import library_of
        from longtail.training.defaults import for_minutes
        from longtail.training.rehearsal import seconds_of

    display, usual = options.display(), options.settings
    # Pretrained weights belong to a network, and a network of another library has its own image size.
    fixed = given | ({"--backbone"} if usual.weights else set())
    fixed |= {"--backbone", "--image-size"} if library_of(usual.backbone) else set()
    free = [
        name for name in ("backbone", "image_size", "augment", "epochs") if f"--{name.replace('_', '-')}" not in fixed
    ]

    def measured(config: TrainConfig) -> float:
        seconds = seconds_of(config, display)
        size = f" at {config.image_size} pixels" if config.image_size else ""
        display.line(f"{config.backbone}{size}, {config.epochs:g} epochs: about {clock(seconds)} here")
        return seconds

    chosen = for_minutes(found, usual, minutes, measured, free)
    display.line(f"chosen for {minutes:g} minutes: {chosen.backbone}, {chosen.epochs:g} epochs")
    return chosen


def _joined(device: str) -> AbstractContextManager[object]:
    """Several processes join before they open images: if one of them finds none, all stop at once."""
    if number_of("WORLD_SIZE", 1) == 1:
        return nullcontext()  # torch is not needed yet
    from longtail.distributed import join

    return join(device)


def _train(options: Train, found: Found | None) -> int:
    if options.resume and options.overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it; give only one of them")
    with loading():
        from longtail.training.loop import train

    display = options.display()
    if found:
        display.line(found.sentence(options.settings))
    try:
        metrics = train(
            options.settings,
            options.out,
            resume=options.resume,
            overwrite=options.overwrite,
            download=options.download,
            trackers=options.tracker,
            display=display,
        )
    except Interrupted as stop:
        command = f"longtail train --out {shlex.quote(str(options.out))} --resume"
        display.line(f"stopped after step {stop.step}; continue with: {command}")
        return EXIT_SIGNAL + stop.signal
    options.print_json({"run": str(options.out), "validation": metrics.to_dict() if metrics else None})
    display.line(f"done: {options.out} (score it with: {command_on('evaluate', options.out)})")
    return 0
