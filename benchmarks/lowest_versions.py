"""The wheel in an empty environment with the lowest declared version of every dependency: does it work?

    python benchmarks/lowest_versions.py            torch too: its packages for CUDA are several GB
    python benchmarks/lowest_versions.py --torch 2.13.0

The lowest versions are read from pyproject.toml; `benchmarks/smoke.py` is what must run there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from common import HERE, write_results

ROOT = HERE.parent
NOTES = """`benchmarks/smoke.py` walks through the Python interface and the commands that need no extra; it ran
in a new environment that holds the wheel and exactly these versions. The line `versions` below is about the environment
that built the wheel."""


def lowest() -> dict[str, str]:
    """Name and lowest version of every dependency."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", one).groups() for one in declared)  # type: ignore[union-attr]


def exact(version: str) -> str:
    """A version with its zeros: 2.4 is 2.4.0."""
    return version if version.count(".") > 1 else exact(f"{version}.0")


def run(*words: str | Path, **options: object) -> None:
    subprocess.run([str(word) for word in words], check=True, **options)  # type: ignore[call-overload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="another version of torch than the lowest")
    versions = {name: exact(version) for name, version in lowest().items()}
    versions |= {name: value for name, value in vars(parser.parse_args()).items() if value}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place)
        run(*build, ROOT, stdout=subprocess.DEVNULL)
        run(sys.executable, "-m", "venv", place / "venv")
        python = place / "venv" / "bin" / "python"
        exactly = [f"{name}=={version}" for name, version in versions.items()]
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", *place.glob("*.whl"), *exactly)
        run(python, "-m", "pip", "check")
        (place / "work").mkdir()
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run(python, HERE / "smoke.py", cwd=place / "work", env=plain, stdout=subprocess.DEVNULL)
    rows = [{"package": name, "version": version} for name, version in versions.items()]
    write_results("lowest_versions", "The lowest declared versions", rows, NOTES)


if __name__ == "__main__":
    main()
