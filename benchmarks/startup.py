"""What starting costs: processor time until a name or a command is ready, and which libraries it goes to.

Each line is a process of its own, run several times with warm files and compiled bytecode; the fastest counts.
`longtail calibrate RUN` is timed up to the moment at which the first images go into the network. The libraries are told
apart by Python's own record of imports (`-X importtime`, the time of each module without those it imports).
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import cifar_root, write_results

from longtail.runs.record import copy_released, find_released

NETWORK = "released:cifar10-lt-100-resnet32-seed0"
SHOWN = ("torch", "numpy", "scipy", "pandas", "sklearn", "longtail")
# The command as it is, ended where the progress of its work would be shown for the first time.
UNTIL_WORK = """
import os
from longtail.cli.main import main
from longtail.files.progress import Display
Display.task = lambda *_, **__: os._exit(0)
main()
"""
STARTS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import sklearn": ["-c", "import sklearn"],
    "import longtail": ["-c", "import longtail"],
    "longtail --help": ["-m", "longtail", "--help"],
    "longtail.Outputs": ["-c", "import longtail; longtail.Outputs"],
    "longtail.MARC": ["-c", "import longtail; longtail.MARC"],
}


def start(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def processor_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start(arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def by_library(arguments: list[str]) -> Counter[str]:
    """Seconds that the modules of each library take to import."""
    spent: Counter[str] = Counter()
    for line in start(["-X", "importtime", *arguments]).stderr.splitlines():
        found = re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)", line)
        if found:
            library = found[2].split(".")[0]
            spent[library if library in SHOWN else "others"] += int(found[1]) / 1e6
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--root", help="folder with CIFAR (default: unpacked once)")
    arguments = parser.parse_args()
    starts = dict(STARTS)
    with tempfile.TemporaryDirectory() as folder:
        run = copy_released(find_released(NETWORK), Path(folder) / "run")
        root = arguments.root or str(cifar_root())
        starts["longtail calibrate RUN, until it works"] = ["-c", UNTIL_WORK, "calibrate", str(run), "--root", root]
        rows: list[dict[str, object]] = []
        for name, command in starts.items():
            taken = min(processor_seconds(command) for _ in range(arguments.times))
            spent = min((by_library(command) for _ in range(arguments.times)), key=lambda one: sum(one.values()))
            libraries = {library: spent.get(library) for library in (*SHOWN, "others")}
            rows.append({"what": name, "processor seconds": taken, **libraries})
    write_results(
        "startup",
        "What starting costs",
        rows,
        "Processor seconds, the fastest of several starts with warm files; then the seconds of each library's own "
        "modules. `longtail.MARC` is a scikit-learn estimator: the class statement needs `BaseEstimator`, and "
        "`import sklearn` by itself imports SciPy's statistics, and pandas where it is installed (longtail alone does "
        "not ask for pandas). Commands that fit nothing start without scikit-learn. Asked for: a calibration works "
        "after ≤ 2.5 s.",
        times=arguments.times,
    )


if __name__ == "__main__":
    main()
