"""What benchmarks share: real data, timing side by side, and results written with where they come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longtail.files.records import provenance
from longtail.metrics.intervals import FEWEST_SEEDS

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"


def shared_folder() -> Path:
    """The folder with real data; LONGTAIL_SHARED says where it is."""
    given = os.environ.get("LONGTAIL_SHARED")
    folder = Path(given) if given else HERE.parent.parent / "shared"
    if not folder.is_dir():
        sys.exit(f"{folder} does not exist: set LONGTAIL_SHARED to the folder with data/")
    return folder


def cifar_root(name: str = "cifar10") -> Path:
    """CIFAR unpacked below benchmarks/.data, once."""
    root = HERE / ".data"
    if not any(root.glob(f"{name[:5]}-{name[5:]}-*")):
        subprocess.run([sys.executable, shared_folder() / "data" / "unpack.py", name, root], check=True)
    return root


def title_of(recipe: str) -> str:
    """`cifar10-lt-100` as people write it: CIFAR-10-LT 100."""
    return recipe.replace("cifar10-lt-", "CIFAR-10-LT ").replace("cifar100-lt-", "CIFAR-100-LT ")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a comparison; none if it was not made."""
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def how_sure(seeds: tuple[int, ...]) -> str:
    """What is known of the spread over seeds, in words."""
    listed = ", ".join(map(str, seeds))
    if len(seeds) >= FEWEST_SEEDS:
        return (
            f"Mean ± 95 % interval over seeds {listed}; differences have the spread of seeds and test images in them."
        )
    count = "One seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return (
        f"{count} ({listed}): **no interval over seeds is known**. The intervals of differences are over test images "
        "alone: they say how sure the difference is for this network, not for another training."
    )


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def processor_seconds(action: Callable[[], Any]) -> float:
    """Seconds of processor time of this process: what the work takes, however busy the machine is."""
    start = time.process_time()
    action()
    return time.process_time() - start


def restart_peak_memory() -> float:
    """Forget the peak of this process's resident memory so far; returns the memory now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_mb()


def peak_memory_mb() -> float:
    """Largest resident memory of this process since it was last forgotten, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def write_results(name: str, title: str, rows: list[dict[str, Any]], notes: str, **extra: Any) -> None:
    """Leave `docs/results/<name>.json` and a Markdown table of the same beside it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    (RESULTS / f"{name}.json").write_text(json.dumps({**origin, **extra, "rows": rows}, indent=2) + "\n")
    columns = list(rows[0])
    lines = [f"# {title}", "", notes, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_shown(row.get(column)) for column in columns) + " |" for row in rows]
    lines += ["", *(f"- {key}: {value}" for key, value in {**origin, **extra}.items())]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
