"""What the tests of faults share: tiny pictures, a warm process to fork commands from, and the page of results."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a forked process has no other threads
os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in a PDF figure

from common import RESULTS

from longtail.files.records import provenance

Words = tuple[str, ...]
PHOTOS = ("--data", "folder", "--root", "{}/../photos", "--backbone", "digits", "--image-size", "8", "--batch-size")
PHOTOS += ("8", "--workers", "0", "--device", "cpu", "--quiet")
TRAIN: Words = ("train", *PHOTOS, "--epochs", "2", "--out", "{}/run")
ON_RUN = ("{}/run", "--workers", "0", "--device", "cpu", "--quiet")
EXTRACT, EVALUATE, MARC = (("extract", *ON_RUN), ("evaluate", *ON_RUN), ("calibrate", "--method", "marc", *ON_RUN))
PACKAGE: Words = ("export", "{}/run/marc", "--format", "safetensors", "--out", "{}/package", "--quiet")
COMPARE: Words = ("compare", *PHOTOS, "--epochs", "1", "--methods", "softmax", "marc", "--seeds", "0")
COMPARE += ("--out", "{}/compare")
REPORT: Words = ("report", "{}/run", "--workers", "0", "--quiet")


def make_photos(folder: Path) -> None:
    """Three classes of tiny pictures in three splits; a few hundred bytes each."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label, size in enumerate((10, 6, 4)):
            (folder / split / str(label)).mkdir(parents=True)
            for number in range(size):
                pixels = rng.integers(40 * label, 120 + 60 * label, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / str(label) / f"{number}.png")


@contextlib.contextmanager
def warm_folder(*, report: bool = True) -> Iterator[Path]:
    """A work folder beside pictures; every command has run once in this process, so a fork of it starts at once."""
    from longtail.cli import main

    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        os.environ["LONGTAIL_CACHE"] = str(work / "cache")
        make_photos(work / "photos")
        folder = work / "warm"
        folder.mkdir()
        commands = (TRAIN, EXTRACT, EVALUATE, MARC, PACKAGE, COMPARE, *((REPORT,) if report else ()))
        for words in commands:
            code = main(at(folder, words))
            assert code == 0, f"longtail {' '.join(words)} ended with {code}"
        shutil.rmtree(folder)
        yield work


def at(folder: Path, words: Words) -> list[str]:
    """The words of a command in a folder."""
    return [word.replace("{}/..", str(folder.parent)).replace("{}", str(folder)) for word in words]


def start(words: Words, folder: Path, before: Callable[[], Any] = lambda: None, said: str = "said.txt") -> int:
    """Start a command in a fork of this process; what it prints goes to a file beside the folder."""

    def command() -> int:
        from longtail.cli import main

        before()
        return main(at(folder, words))

    return in_fork(command, folder, said)


def in_fork(action: Callable[[], int], folder: Path, said: str) -> int:
    """Start an action in a fork of this process, in a group of its own; its result is the exit code."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setpgid(0, 0)
        with (said_folder(folder) / said).open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = action()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 255)


def wait(child: int) -> int:
    """The exit code of a child, minus the signal if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(words: Words, folder: Path, before: Callable[[], Any] = lambda: None) -> int:
    """Run a command in a fork of this process to its end."""
    return wait(start(words, folder, before))


def said_in(folder: Path, name: str = "said.txt") -> str:
    """What the last command printed."""
    return (said_folder(folder) / name).read_text(errors="replace").strip()


def said_folder(folder: Path) -> Path:
    """Where commands print to: beside their folder, unless that disk is to be full."""
    return Path(os.environ.get("FAULTS_SAID", folder.parent))


def must(words: Words, folder: Path) -> None:
    """Run a command that must succeed."""
    if code := in_child(words, folder):
        raise AssertionError(f"longtail {' '.join(words)} in {folder} ended with {code}: {said_in(folder)}")


def is_one_line(text: str) -> bool:
    """Whether a command that failed said so in one line of its own."""
    lines = [line for line in text.splitlines() if line and not line.startswith("longtail: warning:")]
    return len(lines) == 1 and lines[0].startswith("longtail: ") and "Traceback" not in text


PARTS = ("traps", "imbalance", "kills", "signals", "refusals", "hostile files", "fuzzing", "soak")


def record(part: str, rows: list[dict[str, Any]], notes: str) -> None:
    """Put the rows of one part into docs/results/faults.json, and write the page of all parts anew."""
    path = RESULTS / "faults.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    known[part] = {**provenance(), "notes": notes, "rows": rows}
    ordered = {name: known[name] for name in PARTS if name in known}
    path.write_text(json.dumps(ordered, indent=2) + "\n")
    lines = ["# Faults, hostile files, long runs", "", INTRODUCTION]
    for name, content in ordered.items():
        columns = list(content["rows"][0])
        lines += ["", f"## {name.capitalize()}", "", content["notes"], ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in content["rows"]]
        lines += ["", *(f"- {key}: {content[key]}" for key in ("command", "commit", "time", "machine", "versions"))]
    (RESULTS / "faults.md").write_text("\n".join(lines) + "\n")


INTRODUCTION = (
    "Written by `benchmarks/faults.py` and the files beside it; each part says its command. What is promised stands in "
    "`SECURITY.md`."
)
