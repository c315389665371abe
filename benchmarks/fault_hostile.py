"""Hostile files, a few kB each, given to the commands that read them: one line, no code runs, little memory and time.

    python benchmarks/fault_hostile.py

The files are those of `tests/test_hostile_files.py`. Each goes to the whole command in a fork of its own, whose memory
and processor time are measured.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fault_tools import TRAIN, Words, is_one_line, must, record, said_in, start, warm_folder

TESTS = Path(__file__).resolve().parent.parent / "tests" / "test_hostile_files.py"
MOST_SECONDS, MOST_MEMORY_GB = 10, 2.0


def hostile_module() -> Any:
    spec = importlib.util.spec_from_file_location("test_hostile_files", TESTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def attempts(work: Path, folder: Path) -> Iterator[tuple[str, Path, Callable[[], bytes], Words]]:
    """Kind of file, where it lies, its content, and the command that reads it."""
    known = hostile_module()
    out = ("--out", "{}/out", "--quiet")
    train = ("train", "--backbone", "digits", "--image-size", "8", "--epochs", "1", "--workers", "0", *out)
    for name, make in known.LOGITS.items():
        yield "saved logits", work / name, make, ("calibrate", str(work / name), *out)
    for name, make in known.WEIGHTS.items():
        words = (*TRAIN[:-2], "--weights", str(work / name), "--out", "{}/out")
        yield "weights", work / name, lambda make=make: make(work), words
    for name, content in known.LISTS.items():
        words = (*train, "--data", "lists", "--train-list", str(work / name), "--root", str(work))
        yield "lists of images", work / name, lambda content=content: content, words
    for name, make in known.PICTURES.items():
        yield "pictures", work / name, make, ("predict", "{}/run", str(work / name), "--workers", "0", "--quiet")
    for number, content in enumerate((b"a = " + b"[" * 5000, b"a = 1\na = 2", b"\xff", b"x = 99999999999-01-01")):
        path = work / f"{number}.toml"
        yield "settings", path, lambda content=content: content, ("train", "--config", str(path), *out)
    for content in (b"", b"null", b"[]", b"{", b"[" * 200_000, b"\xff", b"1e999999999", b'{"data": {"channels": 1e9}}'):
        path = folder / "run" / "run.json"
        yield "run folders", path, lambda content=content: content, ("evaluate", "{}/run", "--quiet")
    for content in (b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1"):
        path = work / "train.parquet"
        words = (*train, "--data", "parquet", "--train-list", str(path))
        yield "Parquet files", path, lambda content=content: content, words


def main() -> None:
    rows: dict[str, dict[str, Any]] = {}
    with warm_folder(report=False) as work:
        folder = work / "folder"
        folder.mkdir()
        must(TRAIN, folder)
        own = (folder / "run" / "run.json").read_bytes()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for kind, path, make, words in attempts(work, folder):
            path.write_bytes(make())
            _, status, used = os.wait4(start(words, folder), 0)
            code, said = os.waitstatus_to_exitcode(status), said_in(folder)
            seconds, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6
            assert code == 2, f"{path.name}: {code} {said}"
            assert is_one_line(said), f"{path.name}: {said}"
            assert not (work / "ran").exists(), f"{path.name} ran"
            assert not (folder / "out").exists(), f"{path.name} left something"
            assert seconds < MOST_SECONDS, f"{path.name}: {seconds} s"
            assert memory < MOST_MEMORY_GB, f"{path.name}: {memory} GB"
            path.unlink()
            (folder / "run" / "run.json").write_bytes(own)
            row = rows.setdefault(kind, {"files": kind, "number": 0, "one line, exit code 2": 0})
            row["number"] += 1
            row["one line, exit code 2"] += 1
            row["most processor time, s"] = max(row.get("most processor time, s", 0.0), round(seconds, 2))
            row["most memory, GB"] = max(row.get("most memory, GB", 0.0), round(memory, 2))
    for row in rows.values():
        print(row)
    record("hostile files", list(rows.values()), NOTES.format(own=before / 1e6))


NOTES = (
    "Each file goes to the command that reads it, in a process of its own that holds {own:.2f} GB before it begins. No "
    "code in a file ran, nothing was written, nothing took more than 2 GB or 10 s of processor time."
)

if __name__ == "__main__":
    main()
