"""Shared by all commands: parsing options and printing results."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import tyro

from longtail.cli.option_names import require_known
from longtail.core.progress import Display
from longtail.distributed.environment import is_main_process
from longtail.errors import EXIT_CODES, UserError

T = TypeVar("T")
# tyro: invalid choice 'x' for argument '--split'. Expected one of ('test', 'None')
CHOICE = re.compile(
    r"invalid choice '(?P<given>.*)' for argument '(?P<option>.*?)'\. Expected one of \((?P<known>.*?)\)", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Output:
    """How results are shown."""

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


def refuse(options: Output, names: Sequence[str], source: Path, kind: str) -> None:
    """Refuse options that apply only to the other kind of source."""
    for known in fields(options):
        if known.name in names and getattr(options, known.name) != known.default:
            option, other = known.name.replace("_", "-"), "saved logits" if kind == "a run" else "run folders"
            raise UserError(f"--{option} applies only to {other}, and {source} is {kind}; leave it out")


def parse(kind: type[T], words: Sequence[str], command: str, text: str, default: T | None = None) -> T:
    """The options of a command; `--help` prints `text` and the options, and a mistake gives one line."""
    require_known(kind, words, command)
    _require_words(words)
    help_text, complaint = io.StringIO(), io.StringIO()
    # tyro ignores NO_COLOR, but prints no colours if the output is not a terminal.
    kept = os.environ.get("NO_COLOR") or not is_main_process()
    try:
        with redirect_stderr(complaint), redirect_stdout(help_text) if kept else nullcontext():
            return tyro.cli(  # type: ignore[return-value]
                kind,
                args=words,
                prog=f"longtail {command}",
                description=f"{text}\n{EXIT_CODES}",
                default=default,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        print(help_text.getvalue() if is_main_process() else "", end="")
        if stop.code and "Failed to parse key-value pairs" in complaint.getvalue():
            raise UserError(
                f"--options takes names and values in turn: longtail {command} … --options name value"
            ) from None
        if stop.code:
            raise UserError(f"{_first_sentence(complaint.getvalue())}; see longtail {command} --help") from None
        raise


def _require_words(words: Sequence[str]) -> None:
    """Refuse empty words, which would mean the current folder, and words with a NUL, which no path can have."""
    for place, word in enumerate(words):
        if not word or (word.endswith("=") and word.startswith("--")):
            before = word.rstrip("=") or (words[place - 1] if place else "a word")
            raise UserError(f"{before} is empty; give a value or leave it out")
        if "\0" in word:
            raise UserError(f"{word!r} holds a NUL character")


def _first_sentence(box: str) -> str:
    """The first sentence of tyro's error message, without its frame and without help texts."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box).replace("│", " ").splitlines()
    lines = [line.removeprefix("  ").rstrip() for line in plain[1:]]  # the first is a title
    parts = [list(part) for rule, part in itertools.groupby(lines, _is_rule) if not rule]
    said = parts[0] if parts else ["the options cannot be read"]
    if choice := CHOICE.search(" ".join(" ".join(said).split())):
        known = [word.strip("' ") for word in choice["known"].split(",") if word.strip("' ") not in ("", "None")]
        return f"{choice['option']} cannot be {choice['given']!r}; choose from: {', '.join(known)}"
    if not said[0].endswith(":"):
        return " ".join(" ".join(said).split()).removeprefix("Error parsing settings: ").rstrip(".")
    names = [line.strip() for line in said[1:] if not line.startswith(" " * 8)]
    return f"{said[0][0].lower()}{said[0][1:]} {', '.join(names)}"


def _is_rule(line: str) -> bool:
    return set(line.strip()) <= set("─-╰╯")
