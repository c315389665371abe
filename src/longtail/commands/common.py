"""What all commands share: parsing, and where results are printed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tyro

from longtail.display import Display

T = TypeVar("T")


def is_main_process() -> bool:
    """Whether this process prints: of those that torchrun starts only the first."""
    return os.environ.get("RANK", "0") == "0"


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
        """Print a result for programs, if asked."""
        if self.json and is_main_process():
            print(json.dumps(value, allow_nan=False))


def parse(kind: type[T], words: Sequence[str], command: str, text: str, default: T | None = None) -> T:
    """Options of a command from its words; `--help` prints `text` and the options."""
    return tyro.cli(  # type: ignore[return-value]
        kind,
        args=words,
        prog=f"longtail {command}",
        description=text,
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
