"""What the system refuses: no space at any write, no permission, few handles, two at once, a clock that was set back.

    python benchmarks/fault_refusals.py [--most 12]

A full disk is a small tmpfs (mounting needs root): before the n-th operation on files the rest of it is filled. The
command must end with one line and exit code 2, or do its work all the same; what was there before is whole; with space
again, the documented next command gives the bytes of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fault_tools import in_child, is_one_line, make_photos, must, record, said_in, start, wait, warm_folder
from faults import CASES, Case, content, operations, require_whole, watch

ONE_PROCESS = tuple(case for case in CASES if case.rank is None)
NOBODY = 65534
YEAR = 365 * 24 * 3600.0


@contextmanager
def small_disk(size: str = "24m") -> Iterator[Path]:
    """A file system of so many bytes; an error of `mount` where that is not permitted."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "longtail", name], check=True, capture_output=True
        )
        try:
            yield Path(name).resolve()
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def fill(disk: Path) -> None:
    """Leave no byte of a file system."""
    handle = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while True:
            os.write(handle, bytes(1 << 16))
    with suppress(OSError):
        while True:
            os.write(handle, bytes(512))
    os.close(handle)


def prepared(case: Case, folder: Path) -> tuple[Path, int, dict[str, str]]:
    """What the command begins with, its operations, and what it gives undisturbed."""
    begin = folder.parent / "begin"
    for path in (begin, folder):
        shutil.rmtree(path, ignore_errors=True)
    folder.mkdir()
    for words in case.before:
        must(words, folder)
    shutil.copytree(folder, begin)
    total = operations(case, folder)
    return begin, total, content(folder)


def again(begin: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begin, folder)


def settled(case: Case, folder: Path, code: int, expected: dict[str, str]) -> str:
    """How a command ended that was disturbed; then the next one must give what it would have given."""
    said = said_in(folder)
    assert code in (0, 2), f"{case.name} ended with {code}: {said}"
    assert code == 0 or is_one_line(said), f"{case.name}: {said}"
    require_whole(folder)
    if code or content(folder) != expected:
        must(case.again(folder, case.words), folder)
    found = content(folder)
    assert found == expected, (
        case.name,
        sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)),
    )
    return "refused" if code else "done"


def full_disk(case: Case, disk: Path, most: int) -> list[str]:
    """Fill the disk before operations of a command, at most so many of them."""
    folder = disk / "folder"
    begin, total, expected = prepared(case, folder)
    places = min(most, total)
    ends = []
    for place in range(places):
        number = 1 + round(place * (total - 1) / max(places - 1, 1))
        again(begin, folder)

        def act(count: int, number: int = number) -> None:
            if count == number:
                fill(disk)

        code = in_child(case.words, folder, watch(folder, act))
        (disk / "filler").unlink(missing_ok=True)
        ends.append(settled(case, folder, code, expected))
    return ends


def two_at_once(case: Case, work: Path) -> list[str]:
    """The same command twice at the same time: one does the work, the other waits, finds it done, or is refused."""
    folder = work / "folder"
    begin, _, expected = prepared(case, folder)
    again(begin, folder)
    children = [start(case.words, folder, said=f"said{number}.txt") for number in range(2)]
    codes = [wait(child) for child in children]
    for number, code in enumerate(codes):
        said = said_in(folder, f"said{number}.txt")
        assert code == 0 or (code == 2 and is_one_line(said)), f"{case.name}: {code} {said}"
    assert 0 in codes, case.name
    require_whole(folder)
    found = content(folder)
    assert found == expected, (
        case.name,
        sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)),
    )
    return ["refused" if code else "done" for code in codes]


def clock_set_back() -> None:
    """In a child: time of day is ten years ago."""
    now = time.time
    time.time = lambda: now() - 10 * YEAR


def disturbed(
    case: Case, work: Path, before: Callable[[], Any], prepare: Callable[[Path], Any] = lambda folder: None
) -> list[str]:
    """Run a command once under some condition, set in the child, after a change of the folder."""
    folder = work / "folder"
    begin, _, expected = prepared(case, folder)
    again(begin, folder)
    prepare(folder)
    return [settled(case, folder, in_child(case.words, folder, before), expected)]


def from_the_future(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() + YEAR, time.time() + YEAR))


def few_handles() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))


def forbidden(case: Case, work: Path) -> list[str]:
    """As a user who may read everything and write nothing."""
    folder = work / "folder"
    begin, _, _ = prepared(case, folder)
    again(begin, folder)
    kept = content(folder)
    code = in_child(case.words, folder, lambda: os.setuid(NOBODY))
    return _refused(case, folder, code, kept)


def _refused(case: Case, folder: Path, code: int, kept: dict[str, str]) -> list[str]:
    """Nothing has changed, and one line says why."""
    if code != 2 or not is_one_line(said_in(folder)):
        raise AssertionError(f"{case.name}: {code} {said_in(folder)}")
    assert content(folder) == kept, case.name
    return ["refused"]


def read_only(case: Case, disk: Path) -> list[str]:
    """On a file system that lets nobody write."""
    folder = disk / "folder"
    begin, _, _ = prepared(case, folder)
    again(begin, folder)
    kept = content(folder)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        code = in_child(case.words, folder)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    return _refused(case, folder, code, kept)


def row(condition: str, case: Case, ends: list[str]) -> dict[str, Any]:
    found = {"condition": condition, "command": case.name, "attempts": len(ends)}
    found |= {"refused in one line": ends.count("refused"), "done all the same": ends.count("done")}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=12, help="operations per command before which the disk is filled")
    options = parser.parse_args()
    rows = []
    with warm_folder(report=True) as work:
        (work / "said").mkdir(mode=0o777)
        (work / "said").chmod(0o777)
        work.chmod(0o755)
        os.environ["FAULTS_SAID"] = str(work / "said")
        for case in ONE_PROCESS:
            rows.append(row("two at once", case, two_at_once(case, work)))
            rows.append(row("20 file handles", case, disturbed(case, work, few_handles)))
            rows.append(row("clock set back", case, disturbed(case, work, clock_set_back, from_the_future)))
            rows.append(row("no permission", case, forbidden(case, work)))
        with small_disk() as disk:
            make_photos(disk / "photos")
            for case in ONE_PROCESS:
                rows.append(row("disk full at a write", case, full_disk(case, disk, options.most)))
                rows.append(row("read-only file system", case, read_only(case, disk)))
    record("refusals", sorted(rows, key=lambda one: one["condition"]), NOTES)


NOTES = (
    "Each command under each condition. Where it does not do its work it says why in one line, with exit code 2, and "
    "what was there before is whole; then the documented next command gives the bytes of an undisturbed run. The disk "
    "(a tmpfs) is filled before operations on files, evenly chosen. `no permission` is another user than the owner. "
    "With the clock set back, all files before are from the future. `two at once` starts the command twice."
)

if __name__ == "__main__":
    main()
