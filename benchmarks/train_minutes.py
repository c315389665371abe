"""Minutes asked of `longtail train FOLDER --minutes` and minutes taken, on three folders:
docs/results/train_minutes.md.

The folders are of different kinds: tiny grey scans, small photographs, and large photographs of many classes. The time
is that of the whole command, on a machine that does other work, too. Without `--minutes`, the command is stopped as
soon as it has printed how long the training would take.

    python benchmarks/train_minutes.py [--minutes 1 4]
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import shared_folder, write_results
from PIL import Image

from longtail.data.splits import open_splits
from longtail.recipes import RECIPES

LARGE_SIDE = 256


def write_scans(folder: Path) -> None:
    images = open_splits(RECIPES["digits-lt"]).train
    for index, label in enumerate(images.labels.tolist()):
        target = folder / f"digit {label}"
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[index, 0].numpy()).save(target / f"{index}.png")  # type: ignore[attr-defined]


def write_photographs(folder: Path, classes: int, largest: int, smallest: int, side: int | None = None) -> None:
    """Images of CIFAR-100, as they are or enlarged."""
    packed = np.load(shared_folder() / "data" / "cifar100.npz", allow_pickle=False)
    names, labels, ends = packed["classes"].tolist(), packed["train_labels"], packed["train_ends"]
    blob, starts = packed["train_bytes"].tobytes(), np.concatenate([[0], ends[:-1]])
    sizes = np.geomspace(largest, smallest, classes).round().astype(int)
    for label, size in zip(np.random.default_rng(0).permutation(len(names))[:classes], sizes, strict=True):
        target = folder / names[label]
        target.mkdir(parents=True)
        for number in np.flatnonzero(labels == label)[:size]:
            content = blob[starts[number] : ends[number]]
            if side is None:
                (target / f"{number}.webp").write_bytes(content)
            else:
                Image.open(io.BytesIO(content)).resize((side, side)).save(target / f"{number}.jpg", quality=90)


FOLDERS = {
    "tiny scans": ("digits, 8 pixels, grey", write_scans),
    "small photographs": ("33 classes of CIFAR-100, 32 pixels", lambda folder: write_photographs(folder, 33, 500, 10)),
    "large photographs": (
        f"100 classes of CIFAR-100, enlarged to {LARGE_SIDE} pixels",
        lambda folder: write_photographs(folder, 100, 100, 4, LARGE_SIDE),
    ),
}


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    started = [sys.executable, "-m", "longtail", "train", "images", *words]
    return subprocess.Popen(started, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def announced(folder: Path) -> str:
    """What the command says about its length before it starts; it is stopped then."""
    process = command(folder, "--out", "runs/usual")
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"about (.* here.*)", line):
            process.terminate()
            process.wait()
            return found[1]
    raise RuntimeError(f"train has not printed how long it takes: exit code {process.wait()}")


def in_time(folder: Path, minutes: float) -> dict[str, Any]:
    """Train for so many minutes; what was chosen, and how long it took."""
    start, process = time.perf_counter(), command(folder, "--out", f"runs/{minutes:g}", "--minutes", f"{minutes:g}")
    printed = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(printed)
    chosen = re.findall(r"--backbone (\S+) --image-size (\S+) .*--epochs (\S+)", printed)[-1]
    accuracy = re.findall(r"Balanced accuracy (\S+)", printed)[-1]
    return {
        "minutes asked": minutes,
        "minutes taken": round((time.perf_counter() - start) / 60, 2),
        "network, pixels, epochs": ", ".join(chosen),
        "balanced accuracy, validation": accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 4.0])
    arguments = parser.parse_args()
    rows, before = [], []
    for name, (what, write) in FOLDERS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(folder / "images")
            images = sum(1 for path in (folder / "images").rglob("*") if path.is_file())
            before.append(f"- {name}: about {announced(folder)}")
            print(before[-1], flush=True)
            for minutes in arguments.minutes:
                rows.append({"folder": name, "images": f"{images:,}; {what}", **in_time(folder, minutes)})
                print(rows[-1], flush=True)
    notes = (
        "`longtail train FOLDER --minutes M` chooses network, image size and epochs for the machine. Taken is the\n"
        "whole command: trial of the settings, decoding, training, evaluations. Other work ran meanwhile\n"
        f"(load average {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores).\n\n"
        "Without `--minutes`, what the command prints before it starts:\n\n"
    ) + "\n".join(before)
    write_results("train_minutes", "Minutes asked and minutes taken", rows, notes)


if __name__ == "__main__":
    main()
