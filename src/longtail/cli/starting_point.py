"""The configuration that the options of `train` and `compare` change: a recipe, or settings for images at a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.cli.option_names import ALWAYS, Word, require_known, words_of
from longtail.cli.words import dashed, given, take_free_word, value_of, without
from longtail.config import DataConfig, TrainConfig, from_dict, read_toml
from longtail.core.records import read_json
from longtail.errors import UserError
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from longtail.training.defaults import Found

CONFIG = Word("--config", takes_value=True, is_path=True)
# Settings that decide where images are, or which settings suit them; only the parser reads the others.
PLACES = ("data", "root", "train_list", "validation_list", "test_list", "path_column", "label_column", "weights")
NUMBERS = {"image_size": int, "validation": float, "seed": int}
WHAT = "a recipe, an image folder, or a list, CSV or Parquet file"


@dataclass(frozen=True)
class Start:
    """The configuration that options are applied to.

    Args:
        config: the configuration.
        words: the options.
        found: the images at a path, if one was given.
    """

    config: TrainConfig
    words: list[str]
    found: Found | None = None


def starting_point(
    kind: Any, command: str, arguments: list[str], instead: Callable[[TrainConfig], TrainConfig] | None = None
) -> Start:
    """Find the configuration to start from; `kind` is the dataclass of the options, `instead` may replace a recipe."""
    data, words = take_free_word(dashed(arguments), [*words_of(kind), CONFIG])
    file = value_of(words, CONFIG.name)
    settings = read_toml(Path(file)) if file else {}
    words = without(words, CONFIG.name)
    require_known(kind, words, command)
    start = _start(data, settings, words, command)
    if instead:
        start = replace(start, config=instead(start.config))
    return replace(start, config=_with_length(from_dict(settings, start.config), words), words=words)


def _start(data: str | None, settings: dict[str, Any], words: list[str], command: str) -> Start:
    if data in RECIPES:
        return Start(RECIPES[data], words)
    out = value_of(words, "--out") if given(words, "--resume") else None
    if data is None and out and (Path(out) / "run.json").exists():
        # A damaged description is reported by training itself.
        return Start(_stored(Path(out)) or TrainConfig(backbone="resnet18", epochs=90), words)
    own = _own(settings, words)
    if data is None and "data" not in own:
        if any(given(words, option) for option in (*ALWAYS, "-h")):
            return Start(TrainConfig(backbone="resnet18", epochs=90), words)  # for the text of the help
        raise UserError(f"name the data: longtail {command} DATA … (DATA is {WHAT}; see longtail {command} --help)")
    from longtail.training.defaults import VALIDATION, look_at

    if given(words, "--download"):
        _fetch(own, words)
    if data is not None:
        if "data" in own:
            raise UserError(f"the data are named twice, {data!r} and data {str(own['data'])[:80]!r}; name them once")
        root = own.pop("root", None)
        found = look_at(data, root=root, **own)
    else:
        known = {name: own.pop(name) for name in list(own) if name in DataConfig.__dataclass_fields__}
        found = look_at(DataConfig(**{"validation": VALIDATION, **known}), **own)
    return Start(found.config, words, found)


def _fetch(own: dict[str, Any], words: list[str]) -> None:
    from longtail.core.progress import Display
    from longtail.data.download import download_cifar

    quiet = given(words, "--quiet") or given(words, "--json")
    download_cifar(own.get("data", "a path"), own.get("root"), Display(quiet=quiet))


def _own(settings: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The settings of the images in a TOML file and in the options."""
    known = {name.replace("-", "_"): value for name, value in settings.items()}
    found = {name: known[name] for name in (*PLACES, *NUMBERS) if known.get(name) is not None}
    for name in (*PLACES, *NUMBERS):
        text = value_of(words, f"--{name.replace('_', '-')}")
        if text is None:
            continue
        try:
            found[name] = NUMBERS.get(name, str)(text)
        except ValueError:
            continue  # the parser reports the mistake
    return found


def _with_length(config: TrainConfig, words: list[str]) -> TrainConfig:
    """--epochs replaces --iterations of the recipe, and the other way round."""
    if given(words, "--epochs"):
        return replace(config, epochs=1, iterations=None)
    return replace(config, iterations=1, epochs=None) if given(words, "--iterations") else config


def _stored(folder: Path) -> TrainConfig | None:
    try:
        return from_dict(read_json(folder / "run.json").get("config", {}))
    except UserError:
        return None
