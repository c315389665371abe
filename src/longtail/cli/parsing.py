"""Options of the commands, read by tyro: errors are one line, results are tables or JSON.

The options of `train` and `compare` change a recipe, or settings chosen for the images at a path.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from longtail.config import WORKERS, DataConfig, TrainConfig, from_dict, read_toml
from longtail.errors import EXIT_CODES, UserError, choose
from longtail.files.progress import Display
from longtail.files.records import read_json
from longtail.launch import is_main_process
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from longtail.training.defaults import Suggestion

T = TypeVar("T")
MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.SuppressFixed)
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class Output:
    """How results are printed."""

    quiet: bool = False
    """Print nothing but errors."""
    json: bool = False
    """Print the result as JSON on standard output, and nothing else."""

    def display(self) -> Display:
        return Display(quiet=self.quiet or self.json or not is_main_process())

    def print_json(self, value: Any) -> None:
        """Print a result as JSON, with --json."""
        if self.json and is_main_process():
            print(json.dumps(value, allow_nan=False))


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Only for a run folder."""

    root: str | None = None
    """Folder of the data set, if it has moved since training."""
    workers: int = WORKERS
    """Processes that decode images read from files."""


@dataclass(frozen=True, kw_only=True)
class SavedLogits:
    """Only for saved logits."""

    test: Path | None = None
    """Held-out logits and labels to report on."""
    validation: Path | None = None
    """Held-out logits and labels, on which settings are chosen."""
    label_column: str | None = None
    """Column of the labels in .csv files, if it is not called label, labels, y or target."""


def parse(kind: type[T], words: Sequence[str], program: str, text: str, default: T | None = None) -> T:
    """The options of a command; `--help` prints `text` and the options, and a mistake raises one line."""
    _require_values(words)
    error, help_text = io.StringIO(), io.StringIO()
    # tyro ignores NO_COLOR, but prints no colours if the output is not a terminal.
    plain = os.environ.get("NO_COLOR") or not is_main_process()
    try:
        with redirect_stderr(error), redirect_stdout(help_text) if plain else nullcontext():
            return tyro.cli(  # type: ignore[return-value]
                kind, args=words, prog=program, description=f"{text}\n{EXIT_CODES}", default=default, config=MARKERS
            )
    except SystemExit as stop:
        if stop.code:
            raise UserError(f"{_one_line(error.getvalue())}; see {program} --help") from None
        print(help_text.getvalue() if is_main_process() else "", end="")
        raise


def refuse(group: Any, applies_to: str, source: Path, kind: str) -> None:
    """Refuse options of a group that does not apply to a source of this kind."""
    for option in fields(group):
        if getattr(group, option.name) != option.default:
            name = option.name.replace("_", "-")
            raise UserError(f"--{name} applies only to {applies_to}, and {source} is {kind}; leave it out")


def write_completion(words: Sequence[str], commands: Iterable[str]) -> None:
    """Write the completion script that tyro generates for a shell: --tyro-write-completion SHELL FILE."""
    if len(words) < 2 or (len(words) < 3 and words[0] == "--tyro-write-completion"):
        raise UserError("name a shell and a file: longtail --tyro-write-completion bash FILE (or zsh, fish)")
    choose("shell", words[1], SHELLS)
    modules = {name: importlib.import_module(f"longtail.cli.commands.{name}") for name in commands}
    kinds = {name: getattr(module, name.capitalize()) for name, module in modules.items()}
    try:
        tyro.extras.subcommand_cli_from_dict(kinds, prog="longtail", args=words, config=MARKERS)
    except SystemExit as stop:
        if stop.code:
            raise


def _require_values(words: Sequence[str]) -> None:
    """Refuse empty words, which would mean the current folder, and words with a NUL, which no path can have."""
    for index, word in enumerate(words):
        if not word or (word.endswith("=") and word.startswith("--")):
            option = word.rstrip("=") or (words[index - 1] if index else "a word")
            raise UserError(f"{option} is empty; give a value or leave it out")
        if "\0" in word:
            raise UserError(f"{word!r} holds a NUL character")


def _one_line(box: str) -> str:
    """tyro's error message without its frame and without the help texts of options."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", box).replace("│", " ").splitlines()[1:]  # the first is a title
    sections: list[list[str]] = [[]]
    for line in lines:
        if set(line.strip()) <= set("─-╰╯"):  # a rule between sections, or a blank line before details
            sections.append([])
        elif not line.startswith(" " * 10):  # help texts are indented
            sections[-1].append(line.strip())
    messages = [" ".join(section).removeprefix("Error parsing settings: ") for section in sections if section]
    details = ("For full helptext", "Argument helptext", "Got errors")
    shown = [text[0].lower() + text[1:].rstrip(".") for text in messages if not text.startswith(details)]
    names = re.compile(r" \{None\}\|[A-Z]+")  # the type of an option that may be left out
    return "; ".join(names.sub("", text) if text.startswith("perhaps") else text for text in shown)


# Defaults of the options where no data are named.
UNCHOSEN = TrainConfig(data="", backbone="resnet18", epochs=90)
# Settings that decide which images there are, or which other settings suit them.
DATA_SETTINGS = (
    *("data", "root", "train_list", "validation_list", "test_list", "path_column", "label_column", "weights"),
    *("image_size", "validation", "seed", "backbone", "pretrained", "train", "optimizer"),
)
HELP_WORDS = {"-h", "--help"}


@dataclass(frozen=True, kw_only=True)
class Training(Output):
    """Data, and settings of training."""

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    """A recipe, an image folder, or a list, CSV or Parquet file."""
    settings: tyro.conf.OmitArgPrefixes[TrainConfig]
    config: Path | None = None
    """TOML file of settings that replace those of the recipe."""

    def file_settings(self) -> dict[str, Any]:
        """The settings of the TOML file, empty without one."""
        file = read_toml(self.config) if self.config else {}
        return {name.replace("-", "_"): value for name, value in file.items()}

    def given_settings(self, words: Sequence[str]) -> dict[str, Any]:
        """The settings that are named by options."""
        names = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in words}
        return {name: value for name, value in vars(self.settings).items() if f"--{name.replace('_', '-')}" in names}

    def over(self, base: TrainConfig, words: Sequence[str]) -> TrainConfig:
        """A configuration with the settings of the TOML file and then those of the options."""
        return from_dict(self.given_settings(words), from_dict(self.file_settings(), base))


S = TypeVar("S", bound=Training)


def read_training(kind: type[S], words: Sequence[str], program: str, **required: Any) -> S:
    """The options of a command, over settings that do not depend on the data; with --help nothing is required."""
    names = {word.partition("=")[0] for word in words}
    by_batches = "--iterations" in names and "--epochs" not in names
    start = replace(UNCHOSEN, epochs=None, iterations=1) if by_batches else UNCHOSEN
    default = kind(settings=start, **(required if HELP_WORDS & names else dict.fromkeys(required, tyro.MISSING)))
    return parse(kind, [word for word in words if word not in HELP_WORDS], program, "", default)


def with_data(options: S, words: Sequence[str], program: str, text: str) -> tuple[S, Suggestion | None]:
    """The options over the settings for their data; the suggestion, if the settings were chosen from images.

    --help prints `text` and these settings.
    """
    start, suggestion = _starting_point(options, words, program)
    if HELP_WORDS & {*words}:
        settings = from_dict(options.file_settings(), start)
        required = {name: tyro.MISSING for name in ("out", "methods") if hasattr(options, name)}
        parse(type(options), words, program, text, type(options)(settings=settings, **required))
    return replace(options, settings=options.over(start, words)), suggestion


def _starting_point(options: Training, words: Sequence[str], program: str) -> tuple[TrainConfig, Suggestion | None]:
    """The settings that the options change: a recipe, those of the run to resume, or those chosen for images."""
    given = {**options.file_settings(), **options.given_settings(words)}
    given = {name: value for name, value in given.items() if name in DATA_SETTINGS}
    source = options.source
    if source in RECIPES:
        if not given.keys() & {"backbone", "train"}:
            return RECIPES[source], None  # torch is not needed
        from longtail.training.defaults import changed_recipe

        return changed_recipe(source, given), None
    run = getattr(options, "out", Path()) / "run.json"
    if source is None and getattr(options, "resume", False) and run.exists():
        return _stored(run), None
    if source is None and "data" not in given:
        if HELP_WORDS & {*words}:
            return UNCHOSEN, None
        kinds = "a recipe, an image folder, or a list, CSV or Parquet file"
        raise UserError(f"name the data: {program} DATA … (DATA is {kinds}; see {program} --help)")
    if source is not None and "data" in given:
        twice = f"{source!r} and data {str(given['data'])[:80]!r}"
        raise UserError(f"the data are named twice, {twice}; name them once")
    suggestion = _suggestion(options, given)
    return suggestion.config, suggestion


def _suggestion(options: Training, given: dict[str, Any]) -> Suggestion:
    from longtail.data.cifar import download_cifar
    from longtail.training.defaults import VALIDATION, suggest_settings

    if getattr(options, "download", False):
        download_cifar(given.get("data", "a path"), given.get("root"), options.display())
    if options.source is not None:
        return suggest_settings(options.source, **given)
    data = {name: given.pop(name) for name in list(given) if name in DataConfig.__dataclass_fields__}
    return suggest_settings(DataConfig(**{"validation": VALIDATION, **data}), **given)


def _stored(run: Path) -> TrainConfig:
    """The configuration of a run."""
    try:
        config = read_json(run).get("config")
        return from_dict(config if isinstance(config, dict) else {})
    except UserError as error:
        raise error if str(run) in str(error) else UserError(f"{run} is damaged: {error}") from error
