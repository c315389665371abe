"""The first screen of a report for two data sets, as a reader sees it without scrolling: docs/results/first-screens.md.

Digits-LT is the demo. The folder has 33 of CIFAR-100's classes with 500 down to 10 training images, and test images as
imbalanced as those. Each goes through the commands that a new user types; a headless Chromium takes the pictures.

    python benchmarks/first_screens.py [--minutes 3] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import RESULTS, shared_folder

from longtail.files.provenance import provenance

PICTURES = RESULTS / "first-screens"
WIDE, PHONE = (1366, 768), (390, 844)
CLASSES, LARGEST, SMALLEST = 33, 500, 10
TEST_SHARE = 0.2  # test images of a class, relative to its training images


def write_folder(folder: Path) -> None:
    """Image files in train/CLASS and test/CLASS."""
    packed = np.load(shared_folder() / "data" / "cifar100.npz", allow_pickle=False)
    names = packed["classes"].tolist()
    chosen = np.random.default_rng(0).permutation(len(names))[:CLASSES]
    sizes = np.geomspace(LARGEST, SMALLEST, CLASSES).round().astype(int)
    for split, share in (("train", 1.0), ("test", TEST_SHARE)):
        ends, blob, labels = packed[f"{split}_ends"], packed[f"{split}_bytes"].tobytes(), packed[f"{split}_labels"]
        starts = np.concatenate([[0], ends[:-1]])
        for label, size in zip(chosen, sizes, strict=True):
            target = folder / split / names[label]
            target.mkdir(parents=True)
            for number in np.flatnonzero(labels == label)[: max(int(size * share), 3)]:
                (target / f"{number}.webp").write_bytes(blob[starts[number] : ends[number]])


def run(command: str, folder: Path) -> str:
    """Run a command line in a folder; returns what it prints."""
    print(f"$ {command}", flush=True)
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    print(done.stdout, flush=True)
    return done.stdout


def take_picture(page: Path, picture: Path, size: tuple[int, int]) -> None:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": size[0], "height": size[1]})
        opened.set_default_timeout(600_000)
        opened.goto(f"file://{page}")
        opened.wait_for_selector("#accuracy .main-svg")
        opened.screenshot(path=picture)
        browser.close()


def first_screen(name: str, title: str, commands: list[str], folder: Path) -> list[str]:
    """Run the commands, take the pictures of the report, and describe them in lines of Markdown."""
    for command in commands:
        run(command, folder)
    report = folder / "runs" / name / "report"
    for kind, size in (("wide", WIDE), ("phone", PHONE)):
        take_picture(report / "index.html", PICTURES / f"{name}-{kind}.png", size)
    numbers = json.loads((report / "report.json").read_text(encoding="utf-8"))
    headings = {score["name"]: score["heading"] for score in numbers["scores"]}
    before, after = (state["scores"] for state in numbers["states"][:2])
    figures = [f"{headings[score]} {before[score]} → {after[score]}" for score in numbers["figures"]]
    return [
        f"## {title}",
        "",
        *("    " + command for command in commands),
        "",
        f"![The first screen of the report on {title}]({PICTURES.name}/{name}-wide.png)",
        "",
        f'- What got better, what it costs, whether to use it: "{numbers["verdict"]}"',
        f"- Three figures: {', '.join(figures)}.",
        f"- The plot beside them: {len(numbers['classes']['names'])} classes, head to tail, accuracy before and after.",
        f"- [The same on a phone]({PICTURES.name}/{name}-phone.png), 390 pixels wide.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="length of the training on the folder")
    parser.add_argument("--keep", type=Path, help="folder that keeps runs and images")
    arguments = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder / "photos")
        after_training = ["longtail diagnose runs/{}", "longtail calibrate runs/{}", "longtail report runs/{}"]
        trained = {
            ("digits", "digits-LT"): "longtail train digits-lt --out runs/digits",
            ("photos", f"a folder of {CLASSES} classes"): (
                f"longtail train photos --out runs/photos --minutes {arguments.minutes:g}"
            ),
        }
        lines = [
            "# The first screen of a report",
            "",
            "The ten-second test: what a reader sees at 1366 × 768 pixels without scrolling or clicking. It opens",
            "with one sentence (what got better, what it costs, whether to use it), three figures and the classes. All",
            "else is folded below in the order of a reader's questions: which classes pay, whether one can pay less,",
            "whether another method is better, what is confused, whether to trust the confidence, every class, why.",
            "",
            f"The folder holds {CLASSES} of CIFAR-100's classes with {LARGEST} down to {SMALLEST} training images",
            "(WebP, quality 95), and test images as imbalanced as those. Its network is trained for minutes only.",
            "",
        ]
        for (name, title), command in trained.items():
            lines += first_screen(name, title, [command, *(other.format(name) for other in after_training)], folder)
    lines += [f"- {key}: {value}" for key, value in provenance().items()]
    (RESULTS / "first-screens.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
