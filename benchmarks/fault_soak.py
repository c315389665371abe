"""Commands over and over in one process: do memory and file handles grow?

python benchmarks/fault_soak.py [--minutes 15]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fault_tools import EVALUATE, EXTRACT, MARC, PACKAGE, TRAIN, at, record, warm_folder

PREDICT = ("predict", "{}/run/marc", "{}/../photos/test", "--workers", "0", "--device", "cpu", "--quiet")
HALO = (*MARC, "--method", "halo")
CYCLE = (TRAIN, EXTRACT, EVALUATE, MARC, HALO, PACKAGE, PREDICT)


def resident_mb() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Allocated(ctypes.Structure):
    """What glibc says of its heap (`struct mallinfo2`)."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "a", "b", "c", "mapped", "d", "e", "used", "free", "f")]


def allocated_mb() -> float:
    """Memory that is in use by C and C++ code; what was freed does not count, whether or not it was given back."""
    query = ctypes.CDLL(None).mallinfo2
    query.restype = Allocated
    found = query()
    return float(found.used + found.mapped) / 1e6


def count(kind: str) -> float:
    """How many handles (`fd`) or threads (`task`) this process has."""
    return len(list(Path("/proc/self", kind).iterdir()))


def settle_interned_strings() -> None:
    """Let Python's table of interned strings take the size that it keeps.

    Every part of a path is interned, and the names of temporary files are new each time. The table forgets strings, but
    it counts their places as used, and after some thousand of them it is built anew, three times as large as the number
    of strings that it holds: once one step of 3.8 MB (7.7 MB instead of 3.8), later the same size again.
    """
    for number in range(1_000_000):
        sys.intern(f"a string that nobody keeps {number}")


def slope(times: list[float], values: list[float]) -> str:
    """Growth per hour by least squares, and its standard error."""
    hours = np.array(times) / 3600
    (growth, _), cov = np.polyfit(hours, values, 1, cov=True)
    return f"{growth:+.3f} ± {np.sqrt(cov[0, 0]):.3f}"


def main() -> None:
    from longtail.cli import main as longtail

    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=15)
    options = parser.parse_args()
    times: list[float] = []
    measured: dict[str, list[float]] = {name: [] for name in MEASURES}
    with warm_folder(report=False) as work:
        settle_interned_strings()
        begin = time.monotonic()
        folder = work / "folder"
        while time.monotonic() - begin < 60 * options.minutes:
            folder.mkdir()
            for words in CYCLE:
                code = longtail(at(folder, words))
                assert code == 0, words
            shutil.rmtree(folder)
            gc.collect()
            times.append(time.monotonic() - begin)
            for name, measure in MEASURES.items():
                measured[name].append(measure())
    rows = [row(name, times, values) for name, values in measured.items()]
    for found in rows:
        print(found)
    record("soak", rows, NOTES.format(minutes=times[-1] / 60, commands=len(times) * len(CYCLE), rounds=len(times)))


MEASURES: dict[str, Callable[[], float]] = {
    "resident memory, MB": resident_mb,
    "C and C++ memory in use, MB": allocated_mb,
    "Python's blocks of memory, thousands": lambda: sys.getallocatedblocks() / 1e3,
    "file handles": lambda: count("fd"),
    "threads": lambda: count("task"),
}


def row(name: str, times: list[float], values: list[float]) -> dict[str, str]:
    """What was measured after the first third, which fills caches: values, and slopes of the halves of the rest."""
    first = len(times) // 3
    middle = (first + len(times)) // 2
    return {
        "measure": name,
        "after a third": f"{values[first]:.2f}",
        "at the end": f"{values[-1]:.2f}",
        "largest step between two rounds": f"{max(np.diff(values[first:])):+.3f}",
        "growth per hour": slope(times[first:], values[first:]),
        "growth per hour, first half": slope(times[first:middle], values[first:middle]),
        "growth per hour, second half": slope(times[middle:], values[middle:]),
    }


NOTES = (
    "train, extract, evaluate, calibrate (MARC, HALO), export and predict one after another in one process, over and "
    "over: {commands:,} commands, {rounds:,} rounds, {minutes:.1f} minutes. Growth is the slope of a line through the "
    "values after each round, ± its standard error, without the first third. Resident memory also holds what was freed "
    "and not yet given back to the system; memory in use does not. Before the first round, strings that nobody keeps "
    "bring Python's table of interned strings to the size that it keeps: else it is built anew once during the soak, "
    "which is one step of 3.8 MB (malloc of 7,689,584 bytes under PyUnicode_InternInPlace), and none after it."
)

if __name__ == "__main__":
    main()
