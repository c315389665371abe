"""How many functions and files of longtail a call goes through, counted with `sys.setprofile`.

python benchmarks/walk.py            # the three calls, one line each
python benchmarks/walk.py --list     # and the functions of each file
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import longtail
from longtail.cli.main import main

LIMITS = {"calibrate(model, loader)": (120, 22), "calibrate RUN": (230, 45), "report": (280, 55)}
SOURCE = str(Path(longtail.__file__).parent)


def walk(call: Callable[[], Any]) -> dict[str, set[str]]:
    """The functions of longtail that a call enters, by file; comprehensions and module bodies do not count."""
    functions: dict[str, set[str]] = defaultdict(set)

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        inner = code.co_name.startswith("<")
        if event == "call" and not inner and code.co_filename.startswith(SOURCE) and code.co_filename.endswith(".py"):
            functions[code.co_filename[len(SOURCE) + 1 :]].add(code.co_qualname)

    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return {file: names - _class_bodies(file) for file, names in functions.items() if names - _class_bodies(file)}


def _class_bodies(file: str) -> set[str]:
    """The names of classes: importing a file runs their bodies."""
    import ast

    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((Path(SOURCE) / file).read_text()), "")
    return found


def calibrate_model() -> Any:
    """A small classifier and a long-tailed set of 300 samples."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate((200, 70, 30))])
    inputs = torch.randn(300, 8, generator=generator) + 2 * nn.functional.one_hot(labels, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), 64)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return longtail.calibrate(model, loader, progress=False)


def command(*words: str) -> Callable[[], Any]:
    def call() -> None:
        if code := main([*words]):
            raise SystemExit(f"longtail {' '.join(words)} ended with {code}")

    return call


def measure(folder: Path) -> dict[str, dict[str, set[str]]]:
    """The walks of the three calls; a small run is trained first."""
    run = folder / "run"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command("train", "digits-lt", "--epochs", "2", "--device", "cpu", "--out", str(run))()
    return {
        "calibrate(model, loader)": walk(calibrate_model),
        "calibrate RUN": walk(command("calibrate", str(run))),
        "report": walk(command("report", str(run))),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name, files in measure(Path(temporary)).items():
            most = LIMITS[name]
            functions = sum(len(names) for names in files.values())
            print(f"{name}: {functions} functions in {len(files)} files (aim: {most[0]} in {most[1]})")
            if arguments.list:
                for file, names in sorted(files.items()):
                    print(f"  {file} ({len(names)}): {', '.join(sorted(names))}")
