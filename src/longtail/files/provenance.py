"""The version of the library, and what a file says of the machine, the packages and the command that wrote it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

__version__ = "0.2.0.dev0"


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Default number of processes that decode images: more processes than cores would wait for each other.
WORKERS = min(4, usable_cores())


PACKAGES = ("longtail", "torch", "numpy", "scipy", "scikit-learn", "pillow")


def versions() -> dict[str, str]:
    """Python and the packages that results depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def provenance() -> dict[str, str]:
    """The record that is stored beside a result of this process."""
    script, *words = sys.argv
    program = ["longtail"] if Path(script).name in ("longtail", "__main__.py") else ["python", script]
    return {
        "command": shlex.join([*program, *words]),
        "commit": _commit(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }


def _commit() -> str:
    """The commit of the source in use, if it is a checkout."""
    source = Path(__file__).resolve().parents[1]
    if not (source.parents[1] / ".git").exists():
        return "none: an installed package"

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=source, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "--", ".") else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
