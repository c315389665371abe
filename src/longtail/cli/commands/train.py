"""`longtail train`: stage one."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longtail.cli.parsing import Training, read_training, with_data
from longtail.config import TrainConfig
from longtail.data.splits import SOURCES
from longtail.errors import EXIT_SIGNAL, Interrupted, UserError, number
from longtail.files.text import clock, command_on
from longtail.launch import env_number
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from longtail.training.defaults import Suggestion

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
    first = read_training(Train, words, PROGRAM, out=Path())
    with _joined(first.settings.device):
        options, suggestion = with_data(first, words, PROGRAM, HELP)
        if options.minutes is not None:
            given = {*options.given_settings(words), *options.file_settings()}
            options = replace(options, settings=_in_time(options, options.minutes, suggestion, given))
        return _train(options, suggestion)


def _in_time(options: Train, minutes: float, suggestion: Suggestion | None, given: set[str]) -> TrainConfig:
    """Settings with which training takes about so many minutes here; what was given stays."""
    if suggestion is None or options.resume or env_number("WORLD_SIZE", 1) > 1:
        raise UserError(
            "--minutes chooses settings for new runs in one process on images at a path; give --epochs instead"
        )
    number("minutes", minutes, above=0)
    from longtail.backbones.library import library_of
    from longtail.files.atomic import locked_folder
    from longtail.runs.record import require_new_run
    from longtail.training.defaults import for_minutes
    from longtail.training.setup import seconds_of

    display, usual = options.display(), options.settings
    # Pretrained weights belong to a network, and a network of another library fixes the image size.
    fixed = given | ({"backbone"} if usual.weights else set())
    fixed |= {"backbone", "image_size"} if library_of(usual.backbone) else set()
    free = [name for name in ("backbone", "image_size", "augment", "epochs") if name not in fixed]

    def measured(config: TrainConfig) -> float:
        seconds = seconds_of(config, display)
        size = f" --image-size {config.image_size}" if config.image_size else ""
        settings = f"--backbone {config.backbone}{size} --epochs {config.epochs:g}"
        display.line(f"{settings}: about {clock(seconds)} here")
        return seconds

    with locked_folder(options.out):  # trials take a while, so what training would refuse is refused before them
        require_new_run(options.out, overwrite=options.overwrite)
        chosen = for_minutes(suggestion, usual, minutes, measured, free)
    display.line(f"chosen for {minutes:g} minutes: --backbone {chosen.backbone} --epochs {chosen.epochs:g}")
    return chosen


def _joined(device: str) -> AbstractContextManager[object]:
    """Several processes join before they open images: if one of them finds none, all stop at once."""
    if env_number("WORLD_SIZE", 1) == 1:
        return nullcontext()  # torch is not needed yet
    from longtail.distributed import join

    return join(device)


def _train(options: Train, suggestion: Suggestion | None) -> int:
    if options.resume and options.overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it; give only one of them")
    from longtail.training.loop import train

    display = options.display()
    offer = "; --minutes 10 instead chooses network, image size and epochs that fit into 10 minutes"
    if suggestion:
        display.line(suggestion.sentence(options.settings))
    try:
        metrics = train(
            options.settings,
            options.out,
            resume=options.resume,
            overwrite=options.overwrite,
            download=options.download,
            trackers=options.tracker,
            display=display,
            if_long=offer if suggestion and options.minutes is None and not options.resume else "",
        )
    except Interrupted as stop:
        command = f"longtail train --out {shlex.quote(str(options.out))} --resume"
        display.line(f"stopped after step {stop.step}; continue with: {command}")
        return EXIT_SIGNAL + stop.signal
    options.print_json({"run": str(options.out), "validation": metrics.to_dict() if metrics else None})
    following = "diagnose" if metrics and options.settings.train != "head" else "evaluate"
    display.line(f"done: {options.out}\nnext: {command_on(following, options.out)}")
    return 0
