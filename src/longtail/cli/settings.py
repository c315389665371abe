"""Options of `train` and `compare`: they change a recipe, or settings chosen for the images at a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from longtail.cli.parsing import Output, parse
from longtail.config import DataConfig, TrainConfig, from_dict, read_toml
from longtail.errors import UserError
from longtail.files.records import read_json
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from longtail.training.defaults import Found

# Defaults of the first reading of the options; they also stand in the help text where no data are named.
UNCHOSEN = TrainConfig(data="", backbone="resnet18", epochs=90)
# Settings that decide which images there are, or which other settings suit them.
DATA_SETTINGS = (
    *("data", "root", "train_list", "validation_list", "test_list", "path_column", "label_column", "weights"),
    *("image_size", "validation", "seed", "backbone", "pretrained", "train", "optimizer"),
)
HELP_WORDS = ("-h", "--help")


@dataclass(frozen=True, kw_only=True)
class Training(Output):
    """Data, and settings of training."""

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    """A recipe, an image folder, or a list, CSV or Parquet file."""
    settings: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: Path | None = None
    """TOML file of settings that replace those of the recipe."""


T = TypeVar("T", bound=Training)


def first_reading(kind: type[T], words: Sequence[str], program: str, **required: Any) -> T:
    """The options over defaults that do not depend on the data; `required` stands for options without a default."""
    default = kind(settings=_with_length(UNCHOSEN, words), **required)
    return parse(kind, [word for word in words if word not in HELP_WORDS], program, "", default)


def starting_point(first: Training, words: Sequence[str], program: str) -> tuple[TrainConfig, Found | None]:
    """The settings that the options change: a recipe, those of the run to resume, or those chosen for images."""
    file = read_settings(first)
    names = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in words}
    given = {name: value for name, value in vars(first.settings).items() if f"--{name.replace('_', '-')}" in names}
    given = {name: value for name, value in {**file, **given}.items() if name in DATA_SETTINGS}
    if first.source in RECIPES:
        return changed(_recipe(first.source, given), file, words), None
    run = getattr(first, "out", Path()) / "run.json"
    if first.source is None and getattr(first, "resume", False) and run.exists():
        return changed(_stored(run), file, words), None
    if first.source is None and "data" not in given:
        if any(word in HELP_WORDS for word in words):
            return changed(UNCHOSEN, file, words), None
        kinds = "a recipe, an image folder, or a list, CSV or Parquet file"
        raise UserError(f"name the data: {program} DATA … (DATA is {kinds}; see {program} --help)")
    if first.source is not None and "data" in given:
        twice = f"{first.source!r} and data {str(given['data'])[:80]!r}"
        raise UserError(f"the data are named twice, {twice}; name them once")
    found = _look_at(first, given)
    return changed(found.config, file, words), found


def _recipe(name: str, given: dict[str, Any]) -> TrainConfig:
    if not given.keys() & {"backbone", "train"}:
        return RECIPES[name]  # torch is not needed
    from longtail.training.defaults import changed_recipe

    return changed_recipe(name, given)


def _look_at(first: Training, given: dict[str, Any]) -> Found:
    from longtail.data.download import download_cifar
    from longtail.training.defaults import VALIDATION, look_at

    if getattr(first, "download", False):
        download_cifar(given.get("data", "a path"), given.get("root"), first.display())
    if first.source is not None:
        return look_at(first.source, **given)
    data = {name: given.pop(name) for name in list(given) if name in DataConfig.__dataclass_fields__}
    return look_at(DataConfig(**{"validation": VALIDATION, **data}), **given)


def read_settings(options: Training) -> dict[str, Any]:
    """The settings of the TOML file, empty without one."""
    file = read_toml(options.config) if options.config else {}
    return {name.replace("-", "_"): value for name, value in file.items()}


def changed(config: TrainConfig, file: dict[str, Any], words: Sequence[str]) -> TrainConfig:
    """A configuration with the settings of a TOML file; its length gives way to the length in the options."""
    return _with_length(from_dict(file, config), words)


def _with_length(config: TrainConfig, words: Sequence[str]) -> TrainConfig:
    """--epochs replaces the iterations of a recipe, and the other way round; tyro then sets the value."""
    names = {word.partition("=")[0] for word in words}
    if "--epochs" in names:
        return replace(config, epochs=1, iterations=None)
    return replace(config, iterations=1, epochs=None) if "--iterations" in names else config


def _stored(run: Path) -> TrainConfig:
    """The configuration of a run."""
    try:
        config = read_json(run).get("config")
        return from_dict(config if isinstance(config, dict) else {})
    except UserError as error:
        raise error if str(run) in str(error) else UserError(f"{run} is damaged: {error}") from error
