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


def allocated_kb() -> float:
    """Memory that is in use by C and C++ code; what was freed does not count, whether or not it was given back."""
    query = ctypes.CDLL(None).mallinfo2
    query.restype = Allocated
    found = query()
    return float(found.used + found.mapped) / 1e3


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def slope(times: list[float], values: list[float]) -> tuple[float, float]:
    """Growth per hour by least squares, and its standard error."""
    hours = np.array(times) / 3600
    (growth, _), cov = np.polyfit(hours, values, 1, cov=True)
    return float(growth), float(np.sqrt(cov[0, 0]))


def main() -> None:
    from longtail.cli import main as longtail

    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=15)
    options = parser.parse_args()
    times, memory, opened, used, objects, commands = [], [], [], [], [], 0
    with warm_folder(report=False) as work:
        begin = time.monotonic()
        folder = work / "folder"
        while time.monotonic() - begin < 60 * options.minutes:
            folder.mkdir()
            for words in CYCLE:
                code = longtail(at(folder, words))
                assert code == 0, words
                commands += 1
            shutil.rmtree(folder)
            gc.collect()
            times.append(time.monotonic() - begin)
            memory.append(resident_mb())
            used.append(allocated_kb())
            objects.append(float(sys.getallocatedblocks()))
            opened.append(float(handles()))
    third = len(times) // 3  # fills caches
    (growth, error), (grown, uncertain) = (slope(times[third:], values[third:]) for values in (memory, used))
    later = commands * (1 - third / len(times))
    kept, blocks = (memory[-1] - memory[third]) * 1e3 / later, (objects[-1] - objects[third]) / later
    rows = [
        {"measure": "minutes", "value": f"{times[-1] / 60:.1f}"},
        {"measure": "commands", "value": f"{commands:,}"},
        {"measure": "resident memory after the first third, MB", "value": f"{memory[third]:.1f}"},
        {"measure": "resident memory at the end, MB", "value": f"{memory[-1]:.1f}"},
        {"measure": "growth of resident memory, MB per hour ± standard error", "value": f"{growth:+.2f} ± {error:.2f}"},
        {"measure": "resident memory, kB per command", "value": f"{kept:+.2f}"},
        {"measure": "growth of C and C++ memory in use, kB per hour", "value": f"{grown:+.1f} ± {uncertain:.1f}"},
        {"measure": "largest growth of it between two rounds, kB", "value": f"{max(np.diff(used[third:])):+.1f}"},
        {
            "measure": "Python's blocks of memory, per command",
            "value": f"{blocks:+.2f}",
        },
        {
            "measure": "file handles after the first third, and at the end",
            "value": f"{opened[third]:.0f}, {opened[-1]:.0f}",
        },
    ]
    record("soak", rows, NOTES)
    print(rows)


NOTES = (
    "train, extract, evaluate, calibrate (MARC, HALO), export and predict one after another in one process, over and "
    "over. The slopes are those of lines through the values after each round, without the first third. Resident memory "
    "also holds what was freed and not yet given back to the system; memory in use does not."
)

if __name__ == "__main__":
    main()
