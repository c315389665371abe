"""Whether the settings chosen for a folder are sensible: the chosen ones beside others, on folders of CIFAR-10 images.

    python benchmarks/defaults.py --out runs/defaults
    python benchmarks/defaults.py --out runs/defaults --cases hundreds --seeds 0 1 2

Each folder has a long tail of training images and 200 validation images of every class, all of them training images
of CIFAR-10: no test image is looked at. Finished trainings are kept in --out; the same command does what is missing,
and the page holds what is finished.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import cifar_root, write_results
from PIL import Image

from longtail.config import TrainConfig
from longtail.data.splits import open_splits
from longtail.files.progress import QUIET
from longtail.recipes import RECIPES
from longtail.training.defaults import recipe_for
from longtail.training.loop import train

# Images of the largest class, imbalance factor.
CASES = {"hundreds": (80, 20), "thousands": (900, 50)}
VALIDATION = 200  # images per class
CHOSEN = "chosen"
# Name → settings that replace the chosen ones, the quick ones first.
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "hundreds": {
        "30 epochs": {"epochs": 30.0},
        "no augmentation": {"augment": ()},
        "resnet20": {"backbone": "resnet20"},
    },
    "thousands": {
        "30 epochs": {"epochs": 30.0},
        "resnet8": {"backbone": "resnet8"},
        "no augmentation": {"augment": ()},
    },
}


def make_folder(case: str, folder: Path, root: Path) -> Path:
    """The images of a case as PNG files: train/CLASS and val/CLASS."""
    if folder.is_dir():
        return folder
    images = open_splits(replace(RECIPES["cifar10-lt-100"], root=str(root), profile="none", validation=0.0)).train
    largest, imbalance = CASES[case]
    labels, classes = images.labels.numpy(), len(images.class_names)
    temporary = folder.with_name(f".{folder.name}")
    for label, name in enumerate(images.class_names):
        own = np.flatnonzero(labels == label)
        size = int(largest * imbalance ** (-label / (classes - 1)))
        for split, rows in (("val", own[:VALIDATION]), ("train", own[VALIDATION : VALIDATION + size])):
            place = temporary / split / name
            place.mkdir(parents=True, exist_ok=True)
            for row in rows:
                pixels = images.pixels[row].permute(1, 2, 0).numpy()  # type: ignore[attr-defined]
                Image.fromarray(pixels).save(place / f"{row}.png")
    temporary.rename(folder)
    return folder


def settings_of(config: TrainConfig) -> dict[str, Any]:
    return {
        "backbone": config.backbone,
        "epochs": config.epochs,
        "augment": " ".join(config.augment) or "none",
        "batch": config.batch_size,
        "lr": config.lr,
    }


def cell(case: str, name: str, seed: int, data: Path, out: Path) -> None:
    """Train with the chosen settings or with others, unless that is done."""
    place = out / f"{case}-{name.replace(' ', '-')}-seed{seed}"
    result = place.with_suffix(".json")
    if result.is_file():
        return
    config = recipe_for(str(data), seed=seed, **(OTHERS[case][name] if name != CHOSEN else {}))
    start = time.process_time()
    scores = train(replace(config, evaluate_every=1000, workers=0), place, overwrite=place.exists(), display=QUIET)
    assert scores is not None
    taken = time.process_time() - start
    images = open_splits(config).train
    kept = {"train_images": len(images), "accuracy": scores.balanced, "seconds": taken, **settings_of(config)}
    result.write_text(json.dumps(kept) + "\n")
    print(case, name, seed, kept, flush=True)


def rows_of(out: Path, seeds: list[int]) -> list[dict[str, Any]]:
    rows = []
    for case, others in OTHERS.items():
        for name in (CHOSEN, *others):
            files = [out / f"{case}-{name.replace(' ', '-')}-seed{seed}.json" for seed in seeds]
            found = [json.loads(path.read_text()) for path in files if path.is_file()]
            if not found:
                continue
            accuracy = [100 * one["accuracy"] for one in found]
            rows.append(
                {
                    "training images": found[0]["train_images"],
                    "settings": name,
                    **{key: found[0][key] for key in ("backbone", "epochs", "augment", "batch", "lr")},
                    "validation accuracy": round(float(np.mean(accuracy)), 1),
                    "each seed": ", ".join(f"{value:.1f}" for value in accuracy),
                    "processor seconds": round(float(np.mean([one["seconds"] for one in found]))),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--settings", nargs="+", help="names of settings to train (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--root", type=Path, help="folder with CIFAR-10 (default: unpacked once)")
    parser.add_argument("--page", action="store_true", help="write the page and train nothing")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    root = None if arguments.page else arguments.root or cifar_root()
    for case in [] if root is None else arguments.cases:
        data = make_folder(case, out / f"images-{case}", root)
        for seed in arguments.seeds:
            for name in arguments.settings or (CHOSEN, *OTHERS[case]):
                cell(case, name, seed, data, out)
    write_results(
        "defaults",
        "The settings chosen for a folder, beside others",
        rows_of(out, arguments.seeds),
        "Long-tailed folders of CIFAR-10 images (32 x 32). *Chosen*: what `longtail train FOLDER` chooses. The other "
        "rows replace one of its settings. Validation accuracy in per cent on 2,000 images, 200 of each class, taken "
        "from the training images of CIFAR-10 and used for nothing else; so it is balanced accuracy. With one seed its "
        "standard error over images is about one point. No test image was used.",
        command="python benchmarks/defaults.py",
        seeds=arguments.seeds,
    )


if __name__ == "__main__":
    main()
