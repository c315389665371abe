"""Killing every command at every file operation: what is on disk is whole, and the next command gives the same bytes.

    python benchmarks/faults.py [--most 40] [--moments 12] [--only calibrate]

A process in which every command has run once forks one child per attempt. An audit hook in the child counts the
operations on files below the work folder (open for writing, rename, remove, make a folder, …) and sends SIGKILL before
the n-th. Then the documented next command runs undisturbed, and the folder is compared with one that never was
disturbed. Commands that several processes share are started twice, as torchrun starts them, and one of them is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_tools import (
    COMPARE,
    EVALUATE,
    EXTRACT,
    MARC,
    PACKAGE,
    REPORT,
    TRAIN,
    Words,
    in_child,
    must,
    record,
    said_in,
    start,
    warm_folder,
)

OPERATIONS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link")
# Numbers that depend on the clock, and words that depend on how the command was given.
PASSING = ("images_per_s", "seconds", "command", "started_by", "time", "load")


@dataclass(frozen=True)
class Case:
    """A command that is killed, what comes before it, and the one that users are told to run next.

    Args:
        name: in the table.
        words: the command, with `{}` for the work folder.
        before: commands that make what it needs, run once.
        again: the next command, given the work folder after the kill.
        processes: how many work together.
        most: places at which it is killed, if fewer than asked.
    """

    name: str
    words: Words
    before: tuple[Words, ...] = ()
    again: Callable[[Path, Words], Words] = lambda folder, words: words
    processes: int = 1
    most: int = 1000


def resume(folder: Path, words: Words) -> Words:
    return (*words, "--resume") if (folder / "run" / "run.json").is_file() else words


def overwrite(folder: Path, words: Words) -> Words:
    return words if "--overwrite" in words else (*words, "--overwrite")


AGAIN = (*MARC, "--options", "gamma", "0.5", "--overwrite")
CASES = (
    Case("train", TRAIN, again=resume),
    Case("train, two processes", TRAIN, again=resume, processes=2, most=10),
    Case("extract", EXTRACT, (TRAIN,), overwrite),
    Case("extract, two processes", EXTRACT, (TRAIN,), overwrite, processes=2, most=10),
    Case("calibrate", MARC, (TRAIN,), overwrite),
    Case("calibrate, two processes", MARC, (TRAIN,), overwrite, processes=2, most=10),
    Case("calibrate --overwrite", AGAIN, (TRAIN, MARC), overwrite),
    Case("evaluate", EVALUATE, (TRAIN,)),
    Case("export", PACKAGE, (TRAIN, MARC), overwrite),
    Case("export --overwrite", (*PACKAGE, "--overwrite"), (TRAIN, MARC, PACKAGE), overwrite),
    Case("compare", COMPARE),
    Case("report", REPORT, (TRAIN, MARC), most=15),
)


def run_case(case: Case, words: Words, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """Run a command in as many processes as its case has; `before` is called in the first."""
    if case.processes == 1:
        return in_child(words, folder, before)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {"WORLD_SIZE": str(case.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def joined(rank: int) -> Callable[[], None]:
        def prepare() -> None:
            os.environ.update(found, RANK=str(rank), LOCAL_RANK=str(rank))
            if rank == 0:
                before()

        return prepare

    children = {start(words, folder, joined(rank), f"said{rank}.txt") for rank in range(case.processes)}
    codes = []
    while children:
        child, status = os.wait()
        children.remove(child)
        codes.append(os.waitstatus_to_exitcode(status))
        for other in children if codes[-1] else ():
            os.kill(other, signal.SIGKILL)  # as torchrun does with what is left
    shutil.copy(folder.parent / "said0.txt", folder.parent / "said.txt")
    return min(codes)


def watch(folder: Path, act: Callable[[int], None]) -> Callable[[], None]:
    """A hook that calls `act` with the number of each operation on files below a folder, before it is done."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        elif event in OPERATIONS:
            path, writes = arguments[0], True
        else:
            return
        if writes and isinstance(path, str | os.PathLike) and str(path).startswith(str(folder)):
            count += 1
            act(count)

    return lambda: sys.addaudithook(hook)


def operations(case: Case, folder: Path) -> int:
    """How many operations on files an undisturbed run does, in its first process."""
    note = folder.parent / "count"
    handle = os.open(note, os.O_RDWR | os.O_CREAT)
    os.pwrite(handle, b"0    ", 0)

    def act(number: int) -> None:
        os.pwrite(handle, str(number).encode(), 0)

    code = run_case(case, case.words, folder, watch(folder, act))
    os.close(handle)
    assert code == 0, said_in(folder)
    return int(note.read_text())


def content(folder: Path) -> dict[str, str]:
    """A digest of every file, without what depends on the clock; locks are no content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            assert not name.endswith(".part"), f"{name} was left"
            continue
        if path.name.endswith(".lock"):
            continue
        assert not name.endswith(".part"), f"{name} was left"
        found[name] = hashlib.sha256(plain(path).replace(str(folder).encode(), b"{}")).hexdigest()
    return found


def plain(path: Path) -> bytes:
    """The content of a file without times of day and durations."""
    if path.suffix in (".json", ".jsonl"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return json.dumps([without_passing(json.loads(line)) for line in lines], sort_keys=True).encode()
    if path.suffix == ".md":
        return re.sub(rb"- (time|command): .*", b"", path.read_bytes())
    return path.read_bytes()


def without_passing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_passing(item) for key, item in value.items() if key not in PASSING}
    return [without_passing(item) for item in value] if isinstance(value, list) else value


def require_whole(folder: Path) -> None:
    """What is in place after a kill is whole, and files that stand together belong together."""
    from longtail.core.lines import read_lines
    from longtail.core.tensors import read_tensors
    from longtail.runs.folder import Run
    from longtail.tasks.calibration import read_calibration

    for path in folder.rglob("*"):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.suffix == ".safetensors":
            read_tensors(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            read_lines(path)
        if path.name == "run.json" and (path.parent / "model.safetensors").is_file():
            run = Run.open(path.parent)
            run.load_model()
            if run.calibration:
                read_calibration(path.parent, model=run.model_identity)
                for scores in path.parent.glob("before-after-*.json"):
                    assert json.loads(scores.read_text())["model"] == run.model_identity


def attempt(case: Case, begin: Path, folder: Path, kill: Callable[[], None] | float, expected: dict[str, str]) -> bool:
    """Kill once, look, go on, compare; returns whether the command was still running when it was to be killed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begin, folder)
    moment = kill if callable(kill) else lambda: signal.setitimer(signal.ITIMER_REAL, kill)
    code = run_case(case, case.words, folder, moment)  # type: ignore[arg-type]
    assert code in (0, -signal.SIGKILL, -signal.SIGALRM), said_in(folder)
    require_whole(folder)
    words = case.again(folder, case.words)
    code_after = run_case(case, words, folder)
    assert code_after == 0, f"{' '.join(words)}: {said_in(folder)}"
    found = content(folder)
    assert found == expected, sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    return code != 0


def kill_at(folder: Path, number: int) -> Callable[[], None]:
    def act(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch(folder, act)


def examine(case: Case, work: Path, most: int, moments: int = 0) -> dict[str, Any]:
    """Kill a command before its file operations, at most so many of them, and at random moments."""
    begin, folder = work / "begin", work / "folder"
    shutil.rmtree(begin, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    # Runs know where they lie, so what comes before is made at the place where the command runs.
    folder.mkdir(parents=True)
    for words in case.before:
        must(words, folder)
    shutil.copytree(folder, begin)
    clock = time.perf_counter()
    total = operations(case, folder)
    took, expected = time.perf_counter() - clock, content(folder)
    places = min(most, case.most, total)
    numbers = sorted({1 + round(place * (total - 1) / max(places - 1, 1)) for place in range(places)})
    kills = sum(attempt(case, begin, folder, kill_at(folder, number), expected) for number in numbers)
    assert kills == len(numbers), "the operations of a command are not the same each time"
    rng = random.Random(0)
    random_kills = sum(attempt(case, begin, folder, rng.uniform(0.01, took), expected) for _ in range(moments))
    return {
        "command": case.name,
        "file operations": total,
        "killed before one": kills,
        "killed at random": random_kills,
        "same bytes after the next command": kills + random_kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=40, help="operations per command before which it is killed")
    parser.add_argument("--moments", type=int, default=12, help="kills per command at random moments")
    parser.add_argument("--only", nargs="*", help="some commands; their rows are only printed")
    parser.add_argument("--merge", type=Path, nargs="*", help="write the page, from what such parts printed")
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.merge or () for line in path.read_text().splitlines()]
    chosen = [case for case in CASES if not options.merge and case.name in (options.only or [case.name])]
    if chosen:
        with warm_folder(report=any(case.name == "report" for case in chosen)) as work:
            for case in chosen:
                rows.append(examine(case, work, options.most, min(options.moments, case.most // 2)))
                print(json.dumps(rows[-1]), flush=True)
    if options.only:
        return
    rows.sort(key=lambda row: [case.name for case in CASES].index(row["command"]))
    total = {key: sum(row[key] for row in rows) for key in list(rows[0])[1:]}
    record("kills", [*rows, {"command": "all", **total}], NOTES)


NOTES = (
    "Every command is killed (SIGKILL) before its operations on files, evenly chosen where there are many, and at "
    "random moments. After each kill all files in place are whole and belong together; then the documented next "
    "command runs, and the folder holds the same bytes as that of an undisturbed run, without leftovers. Only times of "
    "day and durations are left aside. Of two processes the first is killed, and the other after it, as torchrun does."
)

if __name__ == "__main__":
    main()
