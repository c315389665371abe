"""Killing every command at every file operation: what is on disk is whole, and the next command gives the same bytes.

    python benchmarks/faults.py [--most 60] [--only calibrate]

A process that has imported everything forks one child per attempt. An audit hook in the child counts the operations
on files below the work folder (open for writing, rename, remove, make a folder, …) and sends SIGKILL before the n-th.
Then the documented next command runs undisturbed, and the folder is compared with one that was never disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

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
    """

    name: str
    words: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    again: Callable[[Path, tuple[str, ...]], tuple[str, ...]] = lambda folder, words: words


def resume(folder: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    return (*words, "--resume") if (folder / "run" / "run.json").is_file() else words


def overwrite(folder: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    return words if "--overwrite" in words else (*words, "--overwrite")


TRAIN = ("train", "digits-lt", "--epochs", "2", "--device", "cpu", "--quiet", "--out", "{}/run")
MARC = ("calibrate", "{}/run", "--device", "cpu", "--quiet")
PACKAGE = ("export", "{}/run/marc", "--format", "safetensors", "--out", "{}/package")
COMPARE = ("compare", "digits-lt", "--epochs", "1", "--methods", "softmax", "marc", "tau-norm:tau=0.5", "--seeds", "0")
CASES = (
    Case("train", TRAIN, again=resume),
    Case("extract", ("extract", "{}/run", "--device", "cpu", "--quiet"), (TRAIN,), overwrite),
    Case("calibrate", MARC, (TRAIN,), overwrite),
    Case("calibrate --overwrite", (*MARC, "--options", "gamma", "0.5", "--overwrite"), (TRAIN, MARC), overwrite),
    Case("evaluate", ("evaluate", "{}/run", "--device", "cpu", "--quiet"), (TRAIN,)),
    Case("export", PACKAGE, (TRAIN, MARC), overwrite),
    Case("export --overwrite", (*PACKAGE, "--overwrite"), (TRAIN, MARC, PACKAGE), overwrite),
    Case("compare", (*COMPARE, "--device", "cpu", "--quiet", "--out", "{}/compare")),
    Case("report", ("report", "{}/run", "--quiet"), (TRAIN, MARC)),
)


def in_child(words: tuple[str, ...], folder: Path, before: Callable[[], Any] = lambda: None) -> int:
    """Run a command in a fork of this process; returns its exit code, minus the signal if one ended it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            with (folder.parent / "said.txt").open("w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            from longtail.cli import main

            before()
            code = main([word.replace("{}", str(folder)) for word in words])
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def must(words: tuple[str, ...], folder: Path) -> None:
    if code := in_child(words, folder):
        said = (folder.parent / "said.txt").read_text()
        raise AssertionError(f"longtail {' '.join(words)} in {folder} ended with {code}: {said}")


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
    """How many operations on files an undisturbed run does."""
    note = folder.parent / "count"
    handle = os.open(note, os.O_RDWR | os.O_CREAT)
    os.pwrite(handle, b"0", 0)
    code = in_child(case.words, folder, watch(folder, lambda number: void(os.pwrite(handle, str(number).encode(), 0))))
    os.close(handle)
    assert code == 0, (folder.parent / "said.txt").read_text()
    return int(note.read_text())


def void(_: object) -> None:
    """For a hook, which gives nothing back."""


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
    if path.suffix in (".json", ".jsonl"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return json.dumps([without_passing(json.loads(line)) for line in lines], sort_keys=True).encode()
    if path.suffix in (".pdf", ".svg", ".html", ".csv", ".md", ".tex"):
        # Dates, random names of parts of a picture, and times of a fit: that the file is whole is checked by its end.
        return path.read_bytes()[-6:].strip()
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


def attempt(case: Case, start: Path, folder: Path, kill: Callable[[], None] | float, expected: dict[str, str]) -> bool:
    """Kill once, look, go on, compare; returns whether the command was still running when it was to be killed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    if callable(kill):
        code = in_child(case.words, folder, kill)
    else:
        code = in_child(case.words, folder, lambda: signal.setitimer(signal.ITIMER_REAL, kill))
    require_whole(folder)
    must(case.again(folder, case.words), folder)
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
    start, folder = work / "start", work / "folder"
    shutil.rmtree(start, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    # Runs know where they lie, so what comes before is made at the place where the command runs.
    folder.mkdir(parents=True)
    for words in case.before:
        must(words, folder)
    shutil.copytree(folder, start)
    begin = time.perf_counter()
    total = operations(case, folder)
    took, expected = time.perf_counter() - begin, content(folder)
    numbers = sorted(
        {1 + round(place * (total - 1) / max(min(most, total) - 1, 1)) for place in range(min(most, total))}
    )
    kills = sum(attempt(case, start, folder, kill_at(folder, number), expected) for number in numbers)
    assert kills == len(numbers), "the operations of a command are not the same each time"
    rng = random.Random(0)
    random_kills = sum(attempt(case, start, folder, rng.uniform(0.01, took), expected) for _ in range(moments))
    return {
        "command": case.name,
        "file operations": total,
        "killed before one": kills,
        "killed at random": random_kills,
        "same bytes after the next command": kills + random_kills,
    }


@contextlib.contextmanager
def work_folder():
    """A folder on disk, removed at the end; everything is imported before the first fork."""
    import longtail.cli.commands.calibrate
    import longtail.report.build
    import longtail.tasks.compare
    import longtail.tasks.tables  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def main() -> None:
    from common import write_results

    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=60, help="operations per command before which it is killed")
    parser.add_argument("--moments", type=int, default=10, help="kills per command at random moments")
    parser.add_argument("--only", help="one command")
    options = parser.parse_args()
    rows = []
    with work_folder() as work:
        for case in CASES:
            if options.only in (None, case.name):
                rows.append(examine(case, work, options.most, options.moments))
                print(rows[-1], flush=True)
    if options.only is None:
        rows.append({"command": "all", **{key: sum(row[key] for row in rows) for key in list(rows[0])[1:]}})
        write_results("faults", "Killed at any moment", rows, NOTES)


NOTES = (
    "Every command is killed (SIGKILL) before its operations on files, evenly chosen where there are many, and at "
    "random moments. After each kill all files in place are whole and belong together; then the documented next "
    "command runs, and the folder holds the same bytes as that of an undisturbed run, without leftovers. Numbers that "
    "depend on the clock are left aside; of pages, vector figures and tables only the end is compared."
)

if __name__ == "__main__":
    main()
