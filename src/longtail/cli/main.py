"""The command line: finds the command, parses its options, turns mistakes into one line and exit code 2.

Commands are imported only when they are called, so help is quick.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from rich.table import Table

from longtail.cli.loading import loading
from longtail.core.progress import PlainConsole, silence
from longtail.core.signals import handling, terminations
from longtail.core.version import __version__
from longtail.distributed.environment import has_agent_store, is_main_process, number_of
from longtail.errors import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_SIGNAL,
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    Interrupted,
    ReportedElsewhere,
    Terminated,
    UserError,
    choose,
    is_out_of_memory,
)

# Command → what it does, in one line. `longtail.cli.commands.<command>` has a function `main(arguments)`.
COMMANDS = {
    "distribution": "show the class distribution of a data set before any training",
    "train": "train a classifier on long-tailed images (stage one)",
    "extract": "run a trained model once and keep its features and logits",
    "calibrate": "calibrate a trained model, or saved logits: MARC and other methods (stage two)",
    "compare": "compare methods over seeds: tables with intervals",
    "reproduce": "reproduce a table or figure of the paper, next to the paper's numbers",
    "diagnose": "measure whether a model is biased by the long tail, and whether calibration would help",
    "report": "make an HTML page and figures: margins, accuracy, operating points, before and after",
    "predict": "predict the classes of new images, with probabilities",
    "export": "write a model for another program: ONNX, torch.export, safetensors, a bare head",
    "methods": "list every method: family, paper, what it trains and what it needs",
    "evaluate": "score a trained model: many / medium / few, per class, calibration error",
    "released": "list the trained networks that come with the repository: released:NAME is a run",
    "completion": "print a script that completes commands, options and names in your shell",
}

# Earlier names of commands.
ALIASES = {"profile": "distribution"}

# Commands whose work several processes share.
TOGETHER = ("train", "extract", "calibrate", "evaluate")

STANDARD_ERROR = 2  # the last of the three standard handles

EXAMPLE = "longtail train digits-lt --out runs/digits"
ENVIRONMENT = """Every command takes --quiet (print nothing but errors) and --json (print one JSON document).
Environment: LONGTAIL_CACHE is the folder of data sets (default ~/.cache/longtail); LONGTAIL_RELEASED that of released
networks (default: the clone's); NO_COLOR turns colours off."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with `arguments`, or the program with those of its process; returns its exit code."""
    if arguments is not None:
        return _run(list(arguments))
    _open_standard_streams()
    code = _run(sys.argv[1:])
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _exit_at_once(code)
    return code


def _exit_at_once(code: int) -> NoReturn:
    """Exit as Python does, with threads joined and handlers called, but do not take the interpreter apart.

    Threads of Gloo outlive its process group. If one of them releases its last tensor while the interpreter is taken
    apart, the process is aborted after all its work is done, and torchrun reports a failure.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)


def _run(words: list[str]) -> int:
    try:
        with warnings.catch_warnings(), _terminable():
            warnings.showwarning = _warn
            return _dispatch(words)
    except ReportedElsewhere:
        return EXIT_USER_ERROR
    except UserError as error:
        _complain(str(error))
        return EXIT_USER_ERROR
    except Interrupted as stop:
        if is_main_process():
            _print_error(f"{stop}; run the same command again to continue")
        return EXIT_SIGNAL + stop.signal
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        if is_main_process():
            _print_error("terminated" if terminated else "interrupted")
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except BrokenPipeError:
        # The program that reads our output has ended (`longtail … | head`); this is not an error.
        silence(sys.stdout)
        return 0
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _complain("there is not enough memory for this; a smaller --batch-size or less data needs less")
        return EXIT_USER_ERROR
    except OSError as error:
        # Errors of the system: a file where a folder should be, no space, no permission.
        _complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return EXIT_USER_ERROR


def _open_standard_streams() -> None:
    """Put nothing in the place of a standard stream that a shell has closed: a file there would get what is printed."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(handle)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: unfinished files are removed. Training saves its state first."""
    with handling(_terminate, *terminations()):
        yield


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if is_main_process():
            _print_help()
        return 0
    if words[0] in ("-V", "--version"):
        if is_main_process():
            print(f"longtail {__version__}")
        return 0
    name = choose("command", ALIASES.get(words[0], words[0]), COMMANDS)
    if name not in TOGETHER and number_of("WORLD_SIZE", 1) > 1:
        raise UserError(f"longtail {name} runs in one process; torchrun works with: {', '.join(TOGETHER)}")
    module = importlib.import_module(f"longtail.cli.commands.{name}")
    return int(module.main([_opened(word) for word in words[1:]]) or 0)


def _opened(word: str) -> str:
    """Copy a released network to a run folder in which commands may write."""
    if not word.startswith("released:"):
        return word
    with loading():
        from longtail.runs.released import working_copy

    return str(working_copy(word))


def _print_help() -> None:
    console = PlainConsole(highlight=False)
    console.print("longtail: long-tailed recognition, from training to margin calibration\n")
    console.print("usage: longtail COMMAND [OPTIONS]      longtail COMMAND --help\n", markup=False)
    table = Table.grid(padding=(0, 3))
    for name, summary in COMMANDS.items():
        table.add_row(f"  [bold]{name}[/bold]", summary)
    console.print(table)
    console.print(f"\nexample: {EXAMPLE}\n\n{EXIT_CODES}\n{ENVIRONMENT}", markup=False)


def _warn(message: Warning | str, *where: object, **more: object) -> None:
    """A warning as one line, without file name and line number."""
    if is_main_process():
        _print_error(f"warning: {message}")


def _complain(message: str) -> None:
    """Print an error, unless another process of the same torchrun has printed it."""
    if has_agent_store() and os.environ.get("WORLD_SIZE") != "1":
        from longtail.distributed.store import first_to_say

        if not first_to_say(message):
            return
    _print_error(message)


def _print_error(message: str) -> None:
    """The message as one line, even if it quotes a message of several lines from a library."""
    line = " ".join(message.split())
    PlainConsole(stderr=True, highlight=False).print(f"longtail: {line}", markup=False, soft_wrap=True)
