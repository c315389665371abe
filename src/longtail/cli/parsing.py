"""Shared by all commands: options read by tyro, errors as one line, results as tables or JSON."""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tyro

from longtail.errors import EXIT_CODES, UserError, choose
from longtail.files.progress import Display
from longtail.files.provenance import WORKERS
from longtail.launch import is_main_process

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


@contextmanager
def loading() -> Iterator[None]:
    """Import libraries in this block with garbage collection disabled.

    Imports create hundreds of thousands of objects and free almost none, so collections would only take time. If
    the process has just started, these objects are also left out of later collections (`gc.freeze`).
    """
    starting, enabled = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if starting:
            gc.freeze()
        if enabled:
            gc.enable()


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
