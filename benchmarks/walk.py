"""How large the source is, and how many of its functions and files a call goes through (`sys.setprofile`).

python benchmarks/walk.py            # one line per call, then the size of source and tests
python benchmarks/walk.py --list     # and the functions of each file
python benchmarks/walk.py --write    # also into docs/architecture.md
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
from longtail.files.atomic import write_text
from longtail.files.records import provenance
from longtail.tasks.tables import markdown_table

# Call → functions and files that we aim at.
AIMS = {
    "calibrate(model, loader)": (120, 22),
    "longtail calibrate RUN": (230, 45),
    "longtail calibrate RUN --method marc": (230, 45),
    "longtail report RUN": (280, 55),
}
SIZE_AIMS = {"source": (22_000, 170), "tests": (19_000, None)}
ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(Path(longtail.__file__).parent)
PAGE = ROOT / "docs" / "architecture.md"
MARKS = "<!-- walk -->\n", "<!-- /walk -->"


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
    """The walks of the calls; a small run is trained first."""
    run = folder / "run"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command("train", "digits-lt", "--epochs", "2", "--device", "cpu", "--out", str(run))()
    calls = (
        calibrate_model,
        command("calibrate", str(run)),
        command("calibrate", str(run), "--method", "marc"),
        command("report", str(run)),
    )
    return {name: walk(call) for name, call in zip(AIMS, calls, strict=True)}


def sizes() -> dict[str, tuple[int, int]]:
    """Lines and files of the source and of the tests."""
    files = {"source": sorted(Path(SOURCE).rglob("*.py")), "tests": sorted((ROOT / "tests").rglob("*.py"))}
    return {
        name: (sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths), len(paths))
        for name, paths in files.items()
    }


def with_aim(number: int, aim: int | None) -> str:
    return f"{number:,}" + (f" ({aim:,})" if aim else "")


def tables(walks: dict[str, dict[str, set[str]]]) -> list[str]:
    """The lines of docs/architecture.md; the aim of each number is in brackets."""
    calls = []
    for name, files in walks.items():
        numbers = sum(map(len, files.values())), len(files)
        calls.append([f"`{name}`", *map(with_aim, numbers, AIMS[name])])
    code = [[name, *map(with_aim, numbers, SIZE_AIMS[name])] for name, numbers in sizes().items()]
    return [
        *markdown_table(["call", "functions", "files"], calls),
        "",
        *markdown_table(["Python", "lines", "files"], code),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/architecture.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        walks = measure(Path(temporary))
    for call, files in walks.items() if arguments.list else ():
        print(call)
        for file, names in sorted(files.items()):
            print(f"  {file} ({len(names)}): {', '.join(sorted(names))}")
    lines = tables(walks)
    print("\n".join(lines))
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(MARKS[0])
        origin = f"Commit {provenance()['commit']}, {provenance()['time']}."
        write_text(PAGE, "\n".join([before + MARKS[0].strip(), *lines, "", origin, MARKS[1] + rest.split(MARKS[1])[1]]))
