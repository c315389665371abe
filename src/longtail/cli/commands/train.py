"""`longtail train`: stage one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from longtail.cli.parsing import Output, parse
from longtail.config import TrainConfig, from_dict, read_toml
from longtail.data.sources import SOURCES
from longtail.errors import EXIT_INTERRUPTED, UserError, choose
from longtail.recipes import RECIPES

LAYOUTS = "\n".join(f"  {name:<14}{source.layout}" for name, source in SOURCES.items())
HELP = f"""Train a classifier on long-tailed images (stage one).

longtail train RECIPE --out FOLDER [OPTIONS]

Recipes: {", ".join(RECIPES)}.

A recipe fills in every setting below; options replace them one by one, and so does a TOML file
given with --config FILE. Without a recipe the defaults shown are the start.

Data sets for --data, and what is expected below --root:
{LAYOUTS}

Examples:
  longtail train digits-lt --out runs/digits
  longtail train cifar10-lt-100 --root data --download --out runs/c10 --epochs 60 --batch-size 128
  longtail train --data folder --root photos --backbone resnet50 --image-size 224 --epochs 90 --out runs/photos
  longtail train --data csv --root photos --backbone resnet50 --image-size 224 --epochs 90 --out runs/photos
  longtail train --data parquet --root birds --backbone resnet50 --image-size 224 --epochs 90 --out runs/birds
  longtail train --out runs/c10 --resume
"""


@dataclass(frozen=True)
class Train(Output):
    """What to train, and where it goes."""

    settings: tyro.conf.OmitArgPrefixes[TrainConfig]
    out: Path
    """Folder of the run; made if it does not exist."""
    resume: bool = False
    """Go on from the checkpoint in the folder, bit for bit."""
    download: bool = False
    """Fetch CIFAR from its page first if it is not below --root."""
    tracker: tuple[str, ...] = ()
    """Where the numbers of each evaluation also go: tensorboard, mlflow, csv."""
    tensorboard: bool = False
    """The same as --tracker tensorboard."""


def main(arguments: list[str]) -> int:
    start, rest = starting_point(arguments)
    options = parse(Train, rest, "train", HELP, default=Train(settings=start, out=tyro.MISSING))
    return run(options)


def starting_point(
    arguments: list[str], instead: Callable[[TrainConfig], TrainConfig] | None = None
) -> tuple[TrainConfig, list[str]]:
    """The configuration that options are applied to, and the options; `instead` may replace that of a recipe."""
    rest = list(arguments)
    base = TrainConfig(epochs=90)
    if "--resume" in rest and (folder := _value(rest, "--out")):
        base = _stored(Path(folder)) or base
    if rest and not rest[0].startswith("-"):
        base = RECIPES[choose("recipe", rest.pop(0), RECIPES)]
        base = instead(base) if instead else base
    if file := _value(rest, "--config", remove=True):
        base = from_dict(read_toml(Path(file)), base)
    # An option for one way to say the length of training takes the place of the other.
    if "--epochs" in rest:
        base = replace(base, epochs=1, iterations=None)
    elif "--iterations" in rest:
        base = replace(base, iterations=1, epochs=None)
    return base, rest


def _stored(folder: Path) -> TrainConfig | None:
    try:
        return from_dict(json.loads((folder / "run.json").read_text(encoding="utf-8"))["config"])
    except (OSError, ValueError, KeyError):
        return None  # training itself says what is wrong with the folder


def _value(words: list[str], option: str, *, remove: bool = False) -> str | None:
    """The word after an option."""
    if option not in words:
        return None
    place = words.index(option)
    if place + 1 == len(words):
        raise UserError(f"{option} needs a value")
    value = words[place + 1]
    if remove:
        del words[place : place + 2]
    return value


def run(options: Train) -> int:
    from longtail.training.loop import Interrupted, train

    display = options.display()
    try:
        metrics = train(
            options.settings,
            options.out,
            resume=options.resume,
            download=options.download,
            trackers=(*options.tracker, *(["tensorboard"] if options.tensorboard else [])),
            display=display,
        )
    except Interrupted as stop:
        display.line(
            f"stopped after step {stop.step}; go on with: longtail train --out {shlex.quote(str(options.out))} --resume"
        )
        return EXIT_INTERRUPTED
    options.print_json({"run": str(options.out), "validation": metrics.to_dict() if metrics else None})
    display.line(f"done: {options.out} (score it with: longtail evaluate {shlex.quote(str(options.out))})")
    return 0
