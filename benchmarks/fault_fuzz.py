"""Fuzzing every reader, the command line and the estimators: nothing but an answer or a `UserError` with a message.

    python benchmarks/fault_fuzz.py [--readers 200000] [--estimators 20000] [--state FILE]

Inputs are mutations of small valid files and of extreme arrays, each from its own seed. They are tried in forks of this
process, a block at a time, so that a crash costs one block and is counted as a finding. The state file keeps what is
done: the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fault_seeds import COMMANDS, WORDS, readers_of, valid_files
from fault_tools import record

BLOCK = 500
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
MOST_SECONDS, MOST_MEMORY = 10.0, 2 << 20  # of processor time per input; kB
PIECES = (b"", b"\0", b"\xff" * 8, b"\x80", b"9" * 30, b"-1", b"nan", b"null", b"{}", b"[", b"1e999", b"\n", b",", b'"')


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, pieces removed, repeated, exchanged or put in, ends cut off."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        size = len(found)
        place, other = (rng.randrange(size), rng.randrange(size)) if size else (0, 0)
        span = min(rng.choice((1, 2, 4, 8, 64)), size)
        match rng.randrange(7):
            case 0 if size:
                found[place] ^= 1 << rng.randrange(8)
            case 1 if size:
                found[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del found[place : place + span]
            case 3:
                found[place:place] = found[other : other + span] * rng.choice((1, 2, 50))
            case 4:
                found[place : place + rng.choice((0, span))] = rng.choice(PIECES)
            case 5:
                del found[place:]
            case _:
                found[place : place + 8] = rng.getrandbits(64).to_bytes(8, "little")
    return bytes(found)


def reader_inputs(work: Path) -> Callable[[int], str]:
    """A function that tries input number n on one of the readers; returns what it was and how it ended."""
    for name in import_module("longtail.cli.main").COMMANDS:
        import_module(f"longtail.cli.commands.{name}")  # here, not in every fork
    files = valid_files(work)
    readers = readers_of(work)
    inputs = Path(tempfile.mkdtemp(dir=work))
    pairs = [(name, reader) for reader, names in readers for name in names]

    def attempt(number: int) -> str:
        rng = random.Random(number)
        if number % 100 == 0:
            return f"command line: {_command(rng)}"
        name, reader = pairs[rng.randrange(len(pairs))]
        path = inputs / f"input{Path(name).suffix}" if "." in name else inputs / "input"
        path.write_bytes(mutate(files[name], rng))
        try:
            return f"{name}: {_answer(lambda: reader(path))}"
        finally:
            path.unlink()

    return attempt


def _command(rng: random.Random) -> str:
    """The words of a command, parsed; nothing runs."""
    words = list(rng.choice(COMMANDS))
    for _ in range(rng.randrange(1, 4)):
        words.insert(rng.randrange(1, len(words) + 1), rng.choice(WORDS))
    from longtail.cli.main import _dispatch

    try:
        return _answer(lambda: _dispatch(words))
    except SystemExit:
        return "answered"


def _answer(action: Callable[[], Any]) -> str:
    from longtail.errors import UserError

    try:
        action()
    except UserError as error:
        said = str(error)
        return "refused" if said and len(said) < 2000 else f"FINDING: a message of {len(said)} letters"
    except (TypeError, ValueError) as error:
        # Estimators follow scikit-learn, where these two are what a wrong argument gives; readers do not.
        return f"{type(error).__name__}: {error}"
    return "answered"


def estimator_inputs(work: Path) -> Callable[[int], str]:
    """The same for the estimators, on arrays at the edge of what can be computed with."""
    from fault_arrays import attempt_estimator

    attempt_estimator(random.Random(0))  # what it imports is imported here, not in every fork
    return lambda number: attempt_estimator(random.Random(number))


def block_in_child(attempt: Callable[[int], str], first: int, last: int, work: Path) -> tuple[Counter[str], list[str]]:
    """Try inputs first..last-1 in a fork; returns how many ended how, and what was found."""
    out, now = work / "block.json", work / "now"
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _block(attempt, first, last, out, now)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    found: Counter[str] = Counter()
    findings: list[str] = []
    if out.is_file():
        known = json.loads(out.read_text())
        found, findings = Counter(known["ends"]), known["findings"]
    else:
        findings = [f"input {now.read_text().strip()} ended the process ({os.waitstatus_to_exitcode(status)})"]
    if used.ru_maxrss > MOST_MEMORY:
        findings.append(f"an input of {first}..{last - 1} took {used.ru_maxrss / 1e6:.1f} GB")
    return found, findings


def _block(attempt: Callable[[int], str], first: int, last: int, out: Path, now: Path) -> None:
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    handle = os.open(now, os.O_WRONLY | os.O_CREAT)
    ends: Counter[str] = Counter()
    findings = []
    for number in range(first, last):
        os.pwrite(handle, f"{number:<12}".encode(), 0)
        clock = time.process_time()
        try:
            end = attempt(number)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            end = (
                f"x: FINDING: {type(error).__name__}: {str(error)[:150]} at {Path(where.filename).name}:{where.lineno}"
            )
        if time.process_time() - clock > MOST_SECONDS:
            end = f"{end}: FINDING: {time.process_time() - clock:.0f} s of processor time"
        name, _, said = end.partition(": ")
        kind = said if said in ("answered", "refused") else "error" if "FINDING" not in said else "finding"
        ends[f"{name}|{kind}"] += 1
        if kind == "finding":
            findings.append(f"input {number}, {end}")
    out.write_text(json.dumps({"ends": ends, "findings": findings}))


def run_part(
    name: str, attempt: Callable[[int], str], first: int, total: int, state: dict[str, Any], keep: Callable[[], None]
) -> None:
    """Try the inputs that are left of one part."""
    own = state.setdefault(name, {"done": first, "ends": {}, "findings": []})
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        while own["done"] < total:
            last = min(own["done"] + BLOCK, total)
            found, findings = block_in_child(attempt, own["done"], last, Path(folder))
            own["ends"] = dict(Counter(own["ends"]) + found)
            own["findings"] += findings
            own["done"] = last
            keep()


def rows_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per kind of input."""
    rows = []
    for part, own in state.items():
        names = sorted({key.split("|")[0] for key in own["ends"]})
        for name in names:
            ends = {kind: own["ends"].get(f"{name}|{kind}", 0) for kind in ("answered", "refused", "error", "finding")}
            rows.append({"part": part, "input": name, "inputs": sum(ends.values()), **ends})
    total = {key: sum(row[key] for row in rows) for key in ("inputs", "answered", "refused", "error", "finding")}
    return [*rows, {"part": "all", "input": "", **total}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--readers", type=int, default=200_000)
    parser.add_argument("--estimators", type=int, default=20_000)
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "longtail-fuzz.json")
    parser.add_argument("--first", type=int, default=0, help="number of the first input: parts may run side by side")
    parser.add_argument("--merge", type=Path, nargs="*", help="only write the page, from these state files")
    options = parser.parse_args()
    if options.merge:
        record("fuzzing", rows_of(merged([json.loads(path.read_text()) for path in options.merge])), NOTES)
        return
    state = json.loads(options.state.read_text()) if options.state.is_file() else {}

    def keep() -> None:
        part = options.state.with_suffix(".part")
        part.write_text(json.dumps(state))
        part.replace(options.state)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for name, inputs, total in (
            ("readers and command line", reader_inputs, options.readers),
            ("estimators", estimator_inputs, options.estimators),
        ):
            if total:
                run_part(name, inputs(Path(folder)), options.first, total, state, keep)
    print({name: (own["done"], own["findings"]) for name, own in state.items()})
    if options.first == 0 and options.readers and options.estimators:
        record("fuzzing", rows_of(state), NOTES)


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts of parts that ran side by side."""
    found: dict[str, Any] = {}
    for state in states:
        for name, own in state.items():
            known = found.setdefault(name, {"ends": Counter(), "findings": []})
            known["ends"] += Counter(own["ends"])
            known["findings"] += own["findings"]
    return dict(sorted(found.items(), reverse=True))


NOTES = (
    "Mutations of small valid files for every reader and of the words of every command (bits, bytes, pieces removed, "
    "repeated, put in), and arrays at the edge of what can be computed with for every estimator: 2 to 5,000 classes, "
    "counts up to 1e7, logits up to 1e30, separable, constant and equal classes. `refused` is a `UserError` with a "
    "message, `error` a ValueError or TypeError of the estimators' checks. A finding is any other exception, a crash, "
    "more than 2 GB or 10 s of processor time, or numbers that are not finite in a fit that says it converged."
)

if __name__ == "__main__":
    main()
