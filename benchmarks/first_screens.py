"""First screens of reports on three data sets, as a reader sees them without scrolling: docs/results/first-screens.md.

Digits-LT is the demo, CIFAR-100-LT that of a released network. The folder has 33 of CIFAR-100's classes with 500 down
to 10 training images, and test images as imbalanced as those. Each goes through the commands that a new user types; a
headless Chromium takes the pictures and lists what is inside the screen.

    python benchmarks/first_screens.py [--minutes 6] [--keep FOLDER] [--cifar FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, cifar_root, shared_folder
from PIL import Image

from longtail.data.splits import open_splits
from longtail.files.records import provenance
from longtail.recipes import RECIPES

PICTURES = RESULTS / "first-screens"
WIDE, PHONE = (1366, 768), (390, 844)
CLASSES, LARGEST, SMALLEST = 33, 500, 10
TEST_SHARE = 0.2  # test images of a class, relative to its training images
RELEASED = "cifar100-lt-100-resnet32-seed0"
# The texts that lie within the screen.
SEEN = """() => {
    const inside = (part) => part.getBoundingClientRect().bottom <= innerHeight && part.getClientRects().length;
    const texts = (selector) => [...document.querySelectorAll(selector)].filter(inside)
        .map((part) => part.innerText.trim().replace(/\\s+/g, " "));
    return { title: texts("h1")[0], verdict: texts("#verdict")[0], cards: texts("#cards .card"),
        lines: texts("header p:not(#verdict)"), parts: texts("summary h2") };
}"""


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


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser: Any, address: str, size: tuple[int, int]) -> Any:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.set_default_timeout(600_000)
    page.goto(address)
    return page


def first_screen(name: str, title: str, commands: list[str], folder: Path) -> list[str]:
    """Run the commands, take the pictures of the report, and write down what is seen without scrolling."""
    kept = (folder / "runs" / name / "halo").is_dir()
    for command in commands[-1:] if kept else commands:
        run(command, folder)
    with chromium() as browser:
        for kind, size in (("phone", PHONE), ("wide", WIDE)):
            page = opened(browser, f"file://{folder}/runs/{name}/report/index.html", size)
            page.wait_for_selector("#accuracy .main-svg")
            page.screenshot(path=PICTURES / f"{name}-{kind}.png")
        seen = page.evaluate(SEEN)
    classes = page_classes(folder / "runs" / name / "report" / "report.json")
    return [
        f"## {title}",
        "",
        *("    " + command for command in commands),
        "",
        f"![The first screen of the report on {title}]({PICTURES.name}/{name}-wide.png)",
        "",
        "Seen without scrolling, from the top:",
        "",
        f"- Title: {seen['title']}.",
        f'- What got better, what it costs, whether to use it: "{seen["verdict"]}"',
        f"- Figures: {'; '.join(seen['cards'])}.",
        f"- The plot beside them: {classes} classes, head to tail, accuracy before and after.",
        *(f"- {text}" for text in seen["lines"]),
        f"- Folded: {' · '.join(seen['parts'])}",
        f"- [The same on a phone]({PICTURES.name}/{name}-phone.png), 390 pixels wide.",
        "",
    ]


def page_classes(numbers: Path) -> int:
    return len(json.loads(numbers.read_text(encoding="utf-8"))["classes"]["names"])


def live_page(folder: Path) -> list[str]:
    """Predict new images on the page of `report --serve`, and take its picture."""
    images = open_splits(RECIPES["digits-lt"]).split("test")
    (folder / "scans").mkdir(exist_ok=True)
    for index in range(0, len(images), 15):
        picture = Image.fromarray(images.pixels[index, 0].numpy())  # type: ignore[attr-defined]
        picture.resize((64, 64)).save(folder / "scans" / f"{index:03}.png")
    words = [sys.executable, "-m", "longtail", "report", "runs/digits", "--serve", "--json"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as server, chromium() as browser:
        assert server.stdout is not None
        page = opened(browser, json.loads(server.stdout.readline())["address"], WIDE)
        page.fill("#path", "scans")
        page.get_by_role("button", name="Predict").click()
        page.wait_for_selector("#prior:not([hidden])")
        page.screenshot(path=PICTURES / "live.png")
        server.terminate()
    return [
        "## New images",
        "",
        "    longtail report runs/digits --serve",
        "",
        f"![The page for new images]({PICTURES.name}/live.png)",
        "",
        "Upload images or name a path: the most probable classes before and after calibration, the set of classes at a",
        "coverage, and the class frequencies estimated from all of the images.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="length of the training on the folder")
    parser.add_argument("--keep", type=Path, help="folder that keeps runs and images; what is there is not made again")
    parser.add_argument("--cifar", type=Path, help="folder with cifar-100-python (default: unpacked here)")
    arguments = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "photos").is_dir():
            (folder / "data").symlink_to((arguments.cifar or cifar_root("cifar100")).absolute())
            write_folder(folder / "photos")
        steps = ("diagnose", "calibrate", "report")
        lines = [
            "# The first screen of a report",
            "",
            "The ten-second test: what a reader sees at 1366 × 768 pixels without scrolling or clicking, as a headless",
            "Chromium shows it. The page opens with one sentence (what got better, what it costs, whether to use it),",
            "three figures and the classes. All else is folded below, in the order of a reader's questions.",
            "",
            *first_screen(
                "digits",
                "digits-LT",
                ["longtail train digits-lt --out runs/digits", *(f"longtail {step} runs/digits" for step in steps)],
                folder,
            ),
            *first_screen(
                RELEASED,
                "CIFAR-100-LT 100",
                [
                    f"longtail diagnose released:{RELEASED} --root data",
                    *(f"longtail {step} runs/{RELEASED} --root data" for step in steps[1:]),
                ],
                folder,
            ),
            f"The folder of the next screen holds {CLASSES} of CIFAR-100's classes with {LARGEST} down to {SMALLEST}",
            "training images (WebP, quality 95),",
            "and test images as imbalanced as those. Its network is trained for minutes only.",
            "",
            *first_screen(
                "photos",
                f"a folder of {CLASSES} classes",
                [
                    f"longtail train photos --out runs/photos --minutes {arguments.minutes:g}",
                    *(f"longtail {step} runs/photos" for step in steps),
                ],
                folder,
            ),
            *live_page(folder),
        ]
    made = {
        **provenance(),
        "command": f"python benchmarks/first_screens.py --minutes {arguments.minutes:g}",
    }  # no paths
    lines += [f"- {key}: {value}" for key, value in made.items()]
    (RESULTS / "first-screens.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
