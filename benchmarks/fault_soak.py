"""Commands over and over in one process: do memory and file handles grow?

python benchmarks/fault_soak.py [--minutes 15]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
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
    times, memory, opened, commands = [], [], [], 0
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
            opened.append(float(handles()))
    half = len(times) // 3  # the first third fills caches
    growth, error = slope(times[half:], memory[half:])
    per_command = (memory[-1] - memory[half]) * 1000 / max(commands * (1 - half / len(times)), 1)
    rows = [
        {"measure": "minutes", "value": f"{times[-1] / 60:.1f}"},
        {"measure": "commands", "value": f"{commands:,}"},
        {"measure": "memory after the first third, MB", "value": f"{memory[half]:.1f}"},
        {"measure": "memory at the end, MB", "value": f"{memory[-1]:.1f}"},
        {"measure": "growth of memory, MB per hour ± standard error", "value": f"{growth:+.2f} ± {error:.2f}"},
        {"measure": "growth of memory, kB per command", "value": f"{per_command:+.2f}"},
        {"measure": "file handles after the first third", "value": f"{opened[half]:.0f}"},
        {"measure": "file handles at the end", "value": f"{opened[-1]:.0f}"},
    ]
    record("soak", rows, NOTES)
    print(rows)


NOTES = (
    "train, extract, evaluate, calibrate (MARC, HALO), export and predict one after another in one process, over and "
    "over. The slope is that of a line through the resident memory after each round, without the first third."
)

if __name__ == "__main__":
    main()
