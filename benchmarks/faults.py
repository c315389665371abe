"""Killing every command at every file operation: what is on disk is whole, and the next command gives the same bytes.

    python benchmarks/faults.py [--most 1000] [--moments 12] [--only calibrate]

A process in which every command has run once forks one child per attempt. An audit hook in the child counts the
operations on files below the work folder (open for writing, rename, remove, make a folder, …) and sends SIGKILL before
the n-th. Then the documented next command runs undisturbed, and the folder is compared with one that never was
disturbed. Commands that several processes share run under torchrun's own agent too: each of its two workers is killed
at every operation, and at random moments the agent.
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
    ON_RUN,
    PACKAGE,
    REPORT,
    TRAIN,
    Words,
    in_child,
    must,
    record,
    said_in,
    wait,
    warm_folder,
)
from fault_torchrun import PROCESSES, start_torchrun, under_torchrun

OPERATIONS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link")
# Numbers that depend on the clock, and words that depend on how the command was given.
PASSING = ("images_per_s", "seconds", "command", "started_by", "time", "load")


Next = Callable[[Path, Words], Words]


def same(folder: Path, words: Words) -> Words:
    return words


@dataclass(frozen=True)
class Case:
    """A command that is killed, what comes before it, and the one that users are told to run next.

    Args:
        name: in the table.
        words: the command, with `{}` for the work folder.
        before: commands that make what it needs, run once.
        again: the next command, given the work folder after the kill.
        rank: which of torchrun's two processes is killed; None is a command of one process.
    """

    name: str
    words: Words
    before: tuple[Words, ...] = ()
    again: Next = same
    rank: int | None = None


def resume(folder: Path, words: Words) -> Words:
    return (*words, "--resume") if (folder / "run" / "run.json").is_file() else words


def overwrite(folder: Path, words: Words) -> Words:
    return words if "--overwrite" in words else (*words, "--overwrite")


def on_two(name: str, words: Words, before: tuple[Words, ...] = (), again: Next = same) -> tuple[Case, ...]:
    """A command that torchrun's two processes share; each of them is killed."""
    return tuple(Case(f"{name}, process {rank} of 2", words, before, again, rank) for rank in range(PROCESSES))


ONNX: Words = ("export", "{}/run/marc", "--format", "onnx", "--out", "{}/model.onnx", "--quiet")
PREDICT: Words = ("predict", *ON_RUN[:1], "{}/../photos/test", *ON_RUN[1:], "--out", "{}/predicted.csv")
PLOT: Words = ("distribution", "{}/../photos", "--plot", "{}/plot.png", "--quiet")
AGAIN = (*MARC, "--options", "gamma", "0.5", "--overwrite")
CASES = (
    Case("train", TRAIN, again=resume),
    *on_two("train", TRAIN, again=resume),
    Case("extract", EXTRACT, (TRAIN,), overwrite),
    *on_two("extract", EXTRACT, (TRAIN,), overwrite),
    Case("calibrate", MARC, (TRAIN,), overwrite),
    *on_two("calibrate", MARC, (TRAIN,), overwrite),
    Case("calibrate --overwrite", AGAIN, (TRAIN, MARC), overwrite),
    *on_two("calibrate --overwrite", AGAIN, (TRAIN, MARC), overwrite),
    Case("evaluate", EVALUATE, (TRAIN,)),
    *on_two("evaluate", EVALUATE, (TRAIN,)),
    Case("export", PACKAGE, (TRAIN, MARC), overwrite),
    Case("export --overwrite", (*PACKAGE, "--overwrite"), (TRAIN, MARC, PACKAGE), overwrite),
    Case("export to ONNX", ONNX, (TRAIN, MARC), overwrite),
    Case("compare", COMPARE),
    Case("report", REPORT, (TRAIN, MARC)),
    Case("predict", PREDICT, (TRAIN,), overwrite),
    Case("distribution", PLOT),
)


def run_case(case: Case, words: Words, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """Run a command in as many processes as its case has; `before` is called in the one that is to be killed."""
    if case.rank is None:
        return in_child(words, folder, before)
    return under_torchrun(words, folder, before, case.rank)


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
        # progress.txt is written by the clock: its number would not be the same each time.
        counted = writes and isinstance(path, str | os.PathLike) and Path(path).name != "progress.txt"
        if counted and str(path).startswith(str(folder)):
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
    from longtail.files.records import read_lines
    from longtail.files.tensors import read_tensors
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
            run.model()
            if run.calibration:
                read_calibration(path.parent, model=run.model_identity)
                for scores in path.parent.glob("before-after-*.json"):
                    assert json.loads(scores.read_text())["model"] == run.model_identity


def attempt(case: Case, begin: Path, folder: Path, kill: Callable[[], int], expected: dict[str, str]) -> bool:
    """Kill once, look, go on, compare; returns whether the command was still running when it was to be killed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begin, folder)
    code = kill()
    assert code in (0, -signal.SIGKILL, -signal.SIGALRM), said_in(folder)
    words = case.again(folder, case.words)
    code_after = run_case(case, words, folder)
    assert code_after == 0, f"{' '.join(words)}: {said_in(folder)}"
    found = content(folder)
    assert found == expected, sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    return code != 0


def kill_at(case: Case, folder: Path, number: int) -> int:
    """Kill a command before its n-th operation on files."""

    def act(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    code = run_case(case, case.words, folder, watch(folder, act))
    require_whole(folder)
    return code


def kill_after(case: Case, folder: Path, seconds: float) -> int:
    """Kill a command after some time."""
    code = run_case(case, case.words, folder, lambda: signal.setitimer(signal.ITIMER_REAL, seconds) and None)
    require_whole(folder)
    return code


def kill_agent(case: Case, folder: Path, seconds: float) -> int:
    """Kill torchrun itself after some time; its workers may live for a moment beside the next command."""
    agent = start_torchrun(case.words, folder)
    time.sleep(seconds)
    os.kill(agent, signal.SIGKILL)
    return wait(agent)


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
    places = min(most, total)
    numbers = sorted({1 + round(place * (total - 1) / max(places - 1, 1)) for place in range(places)})

    findings = []

    def tried(kill: Callable[[Case, Path, Any], int], when: float) -> bool:
        try:
            return attempt(case, begin, folder, lambda: kill(case, folder, when), expected)
        except (AssertionError, ValueError) as error:
            findings.append(f"{case.name}, {kill.__name__} {when}: {error}")
            print(findings[-1], file=sys.stderr, flush=True)
            return True

    kills = sum(tried(kill_at, number) for number in numbers)
    assert kills == len(numbers), "the operations of a command are not the same each time"
    rng = random.Random(0)
    random_kills = sum(tried(kill_after, rng.uniform(0.01, took)) for _ in range(moments))
    agent_kills = sum(tried(kill_agent, rng.uniform(0.01, took)) for _ in range(moments if case.rank == 0 else 0))
    return {
        "command": case.name,
        "file operations": total,
        "killed before one": kills,
        "killed at random": random_kills,
        "torchrun killed at random": agent_kills,
        "same bytes after the next command": kills + random_kills + agent_kills - len(findings),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=1000, help="operations per command before which it is killed")
    parser.add_argument("--moments", type=int, default=12, help="kills per command at random moments")
    parser.add_argument("--only", nargs="*", help="some commands; their rows are only printed")
    parser.add_argument("--merge", type=Path, nargs="*", help="write the page, from what such parts printed")
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.merge or () for line in path.read_text().splitlines()]
    chosen = [case for case in CASES if not options.merge and case.name in (options.only or [case.name])]
    if chosen:
        with warm_folder(report=any(case.name == "report" for case in chosen)) as work:
            for case in chosen:
                rows.append(examine(case, work, options.most, options.moments))
                print(json.dumps(rows[-1]), flush=True)
    if options.only:
        return
    rows.sort(key=lambda row: [case.name for case in CASES].index(row["command"]))
    total = {key: sum(row[key] for row in rows) for key in list(rows[0])[1:]}
    record("kills", [*rows, {"command": "all", **total}], NOTES)


NOTES = (
    "Every command is killed (SIGKILL) before its operations on files, all of them or evenly chosen ones, and at "
    "random moments. Rows may come from runs at different commits. After each kill all files in place are whole "
    "and belong together; then the documented next command runs, and the folder holds the same bytes as that of "
    "an undisturbed run, without leftovers. Only times of day and durations are left aside. Two processes run "
    "under torchrun's agent: the named one is killed, and the agent ends the other. A process without operations on "
    "files writes nothing: it can only be killed at random moments. When the agent is killed, the next command starts "
    "at once, while its workers may still live."
)

if __name__ == "__main__":
    main()
