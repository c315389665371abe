"""Ctrl-C, SIGTERM and a closed terminal at the file operations of every command: a line, an exit code, nothing left.

    python benchmarks/fault_signals.py [--most 12]

A command gets a signal before its n-th operation on files. It ends with exit code 130 or 143 and one line, or does its
work all the same; no unfinished file stays; then the documented next command gives the bytes of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from fault_refusals import ONE_PROCESS, again, prepared
from fault_tools import in_child, is_one_line, must, record, said_in, warm_folder
from faults import Case, content, require_whole, watch

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def attempt(case: Case, folder: Path, number: int, place: int, expected: dict[str, str]) -> str:
    """Send one signal; how the command ended, or what was wrong with it."""

    def act(count: int) -> None:
        if count == place:
            os.kill(os.getpid(), number)

    code, said = in_child(case.words, folder, watch(folder, act)), said_in(folder)
    if code not in (0, CODES[signal.Signals(number)]):
        return f"exit code {code}: {said[-300:]}"
    if code and said and not is_one_line(said):  # training that is quiet says nothing: it has lost nothing
        return f"not one line: {said[-300:]}"
    left = [path.name for path in folder.rglob("*") if path.name.endswith(".part")]
    if left:
        return f"left: {left}"
    require_whole(folder)
    if code:
        must(case.again(folder, case.words), folder)
    found = content(folder)
    if found != expected:
        return f"other bytes: {sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))}"
    return "stopped" if code else "done"


def examine(case: Case, work: Path, most: int) -> list[dict[str, Any]]:
    folder = work / "folder"
    begin, total, expected = prepared(case, folder)
    rows = []
    for number in CODES:
        ends = []
        for place in sorted({1 + round(step * (total - 1) / max(most - 1, 1)) for step in range(min(most, total))}):
            again(begin, folder)
            ends.append(attempt(case, folder, number, place, expected))
            if ends[-1] not in ("stopped", "done"):
                print(f"{case.name}, {number.name} at {place}: {ends[-1]}", file=sys.stderr, flush=True)
        good = {"stopped": ends.count("stopped"), "done all the same": ends.count("done")}
        rows.append({"command": case.name, "signal": number.name, "attempts": len(ends), **good})
        print(rows[-1], flush=True)
    shutil.rmtree(folder)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=12, help="operations per command at which a signal is sent")
    options = parser.parse_args()
    with warm_folder(report=False) as work:
        rows = [row for case in ONE_PROCESS for row in examine(case, work, options.most)]
    record("signals", rows, NOTES)


NOTES = (
    "Each command gets a signal before its operations on files, evenly chosen. It stops with one line and exit code "
    "130 or 143, or does its work all the same, if the signal comes at its very end. No unfinished file stays, and the "
    "documented next command gives the bytes of an undisturbed run."
)

if __name__ == "__main__":
    main()
