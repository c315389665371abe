"""Progress of a long job: a live bar on a terminal or in a notebook, plain lines elsewhere, nothing with `quiet`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from longtail.files.text import clock, visible

LINE_SECONDS = 10.0
WIDE, NARROW = 100, 72  # columns of a terminal: everything is shown from the first on, and no bar below the second


class PlainConsole(Console):
    """A console that escapes control characters in names from files, so that they cannot move the cursor."""

    def render_str(self, text: str, **more: Any) -> Text:
        return super().render_str(visible(text), **more)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the command line decides; rich would exit with code 1

    def _check_buffer(self) -> None:
        """Write the buffer; an error of standard error, which only shows progress, must not stop the work."""
        try:
            super()._check_buffer()
        except OSError:
            if not self.stderr:
                raise
            silence(sys.stderr)


def silence(stream: Any) -> None:
    """Discard the buffer of a stream whose reader is gone or whose disk is full."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass
class Task:
    """One job with a total number of units, such as images; `first` of them were done before it began."""

    display: Display
    title: str
    total: int
    done: int
    first: int
    unit: str
    bar: Progress | None = None
    note: str = ""
    start: float = field(default_factory=time.monotonic)
    last_line: float = field(default_factory=time.monotonic)

    def advance(self, amount: int, note: str = "") -> None:
        """Add `amount` to the units that are done; `note` is shown beside the bar."""
        self.done += amount
        self.first = min(self.first, self.done)  # a resumed job may continue from an earlier point
        self.note = note or self.note
        if self.bar:
            speed = f"{self.speed:.0f} {self.unit}/s"
            self.bar.update(self.bar.task_ids[0], completed=self.done, speed=speed, note=self.note)
        elif time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            self.display.line(self.describe())

    @property
    def speed(self) -> float:
        """Units per second since the task was opened."""
        return (self.done - self.first) / max(time.monotonic() - self.start, 1e-9)

    def describe(self) -> str:
        """Share that is done, speed, and time to the end at the speed so far."""
        percent = 100 * self.done / max(self.total, 1)
        left = clock((self.total - self.done) / self.speed) if self.speed else "unknown time"
        columns = (f"{self.title} {percent:3.0f} %", f"{self.speed:.0f} {self.unit}/s", f"{left} left", self.note)
        return "  ".join(filter(None, columns))


class Display:
    """Where progress and results are printed; progress goes to standard error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.out = PlainConsole(quiet=quiet, highlight=False)
        self.error = PlainConsole(stderr=True, quiet=quiet, highlight=False)

    def line(self, text: str) -> None:
        """One line about the progress."""
        self.error.print(text, markup=False, soft_wrap=True)

    def table(self, table: RenderableType) -> None:
        """A result."""
        self.out.print(table)

    @contextmanager
    def task(self, title: str, total: int, *, done: int = 0, unit: str = "images") -> Iterator[Task]:
        """A progress bar in a terminal or a notebook, a line every few seconds elsewhere."""
        task = Task(self, title, total, done, done, unit)
        # A notebook without ipywidgets would show an empty bar.
        shows_bar = find_spec("ipywidgets") is not None if self.error.is_jupyter else sys.stderr.isatty()
        if self.quiet or not shows_bar:
            yield task
            return
        with Progress(*_columns(self.error.width), console=self.error) as bar:
            bar.add_task(title, total=total, completed=done, speed="", note="")
            task.bar = bar
            yield task


def _columns(width: int) -> list[ProgressColumn]:
    """What a bar shows: in a narrow terminal only what fits without being cut."""
    title, left, speed = TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn("{task.fields[speed]}")
    note, percent = TextColumn("{task.fields[note]}"), TextColumn("{task.percentage:3.0f} %")
    if width >= WIDE:
        return [title, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, speed, note]
    if width >= NARROW:
        return [title, BarColumn(bar_width=10), percent, left, speed, note]
    return [title, percent, left, speed]


QUIET = Display(quiet=True)
