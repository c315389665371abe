"""The command line: finds the command, and turns errors into one line and an exit code.

Commands are imported only when they are called, so help is quick.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from rich.table import Table

from longtail import __version__
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
from longtail.files.progress import PlainConsole, silence
from longtail.launch import env_number, has_agent_store, is_main_process, signal_handler, termination_signals

# Command → what it does, in one line. `longtail.cli.commands.<command>` has a function `main(arguments)`.
COMMANDS = {
    "distribution": "show the class distribution of a data set before any training",
    "train": "train a classifier on long-tailed images (stage one)",
    "extract": "run a trained model once and keep its features and logits",
    "calibrate": "calibrate a trained model, or saved logits: MARC and other methods (stage two)",
    "probe": "fit a linear head for long-tailed classes on embeddings of a pretrained network",
    "compare": "compare methods over seeds: tables with intervals",
    "diagnose": "measure whether a model is biased by the long tail, and whether calibration would help",
    "report": "make an HTML page and figures: margins, accuracy, operating points, before and after",
    "predict": "predict the classes of new images, with probabilities",
    "export": "write a model for another program: ONNX, torch.export, safetensors, a bare head",
    "methods": "list every method, or the released networks: released:NAME is a run",
    "evaluate": "score a trained model: many / medium / few, per class, calibration error",
}

# Commands that several processes of torchrun can share.
DISTRIBUTED = ("train", "extract", "calibrate", "evaluate")

GC_THRESHOLD = 50_000  # objects
STANDARD_ERROR = 2  # the last of the three standard streams

EXAMPLE = "longtail train digits-lt --out runs/digits"
ENVIRONMENT = """Every command takes --quiet (errors only) and --json (one JSON document).
LONGTAIL_CACHE is the folder of data sets (default ~/.cache/longtail),
LONGTAIL_RELEASED that of released networks (default: in the clone);
NO_COLOR turns colours off.
Completion of commands (bash, zsh, fish):
  longtail --tyro-write-completion bash FILE
The tables and figures of the paper: python -m longtail.paper"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with `arguments`, or the program with those of its process; returns its exit code."""
    return program(_dispatch, arguments)


def program(command: Callable[[list[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Call a command with `arguments`, or with those of its process; errors become one line and an exit code."""
    if arguments is not None:
        return _run(command, list(arguments))
    _open_standard_streams()
    # Imports create hundreds of thousands of objects and free almost none: with the default threshold, a seventh of
    # the start would be garbage collection.
    gc.set_threshold(GC_THRESHOLD)
    code = _run(command, sys.argv[1:])
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


def _run(command: Callable[[list[str]], int], words: list[str]) -> int:
    try:
        # SIGTERM ends a command as Ctrl-C does: unfinished files are removed. Training saves its state first.
        with warnings.catch_warnings(), signal_handler(_terminate, *termination_signals()):
            warnings.showwarning = _warn
            return command(words)
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
    """Open the null device for standard streams that a shell has closed; otherwise files would get their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(handle)


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
    if words[0] in ("--tyro-print-completion", "--tyro-write-completion"):
        from longtail.cli.parsing import write_completion

        write_completion(words, COMMANDS)
        return 0
    name = choose("command", words[0], COMMANDS)
    if name not in DISTRIBUTED and env_number("WORLD_SIZE", 1) > 1:
        raise UserError(f"longtail {name} runs in one process; torchrun works with: {', '.join(DISTRIBUTED)}")
    if any(word.startswith("released:") for word in words):  # copied to a folder in which commands may write
        from longtail.runs.record import copy_released, find_released

        words = [str(copy_released(find_released(word))) if word.startswith("released:") else word for word in words]
    return int(importlib.import_module(f"longtail.cli.commands.{name}").main(words[1:]))


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
        from longtail.launch import first_to_report

        if not first_to_report(message):
            return
    _print_error(message)


def _print_error(message: str) -> None:
    """The message as one line, even if it quotes a message of several lines from a library."""
    line = " ".join(message.split())
    PlainConsole(stderr=True, highlight=False).print(f"longtail: {line}", markup=False, soft_wrap=True)
