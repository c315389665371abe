"""A whole calibration on a few images of every class beside one forward pass over the training set.

A released ResNet-32 is calibrated as `longtail calibrate RUN` does it: the run is opened, its images and its network
are loaded, the chosen images are run (one augmented view), MARC is solved, folded and written. Outputs of held-out
images were computed before: that price is shown apart. A forward pass is the network as trained over all training
images, once. Everything is processor time on one thread; half of a forward pass is run before a calibration and half
behind it, so that both see the same machine. The images are drawn anew for each round, by its number.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import cifar_root, processor_seconds, write_results

from longtail import MARC
from longtail.backbones import BATCH
from longtail.data.loading import in_order, load
from longtail.runs.folder import Run
from longtail.runs.record import copy_released, find_released
from longtail.tasks.calibrate_run import calibrate_run


def measure(name: str, root: str, rounds: int, folder: Path) -> list[dict[str, object]]:
    copy_released(find_released(f"released:{name}"), folder)
    run = Run.open(folder).using(root=root)
    splits = run.splits
    model = run.model().eval()
    _, clean = run.transforms()
    images = [batch.images for batch in load(splits.train, clean, in_order(len(splits.train), BATCH))]

    @torch.inference_mode()
    def forward(batches: list[torch.Tensor]) -> None:
        for batch in batches:
            model(batch)

    def calibrate(few: str, seed: int) -> float:
        """Balanced accuracy on the test images."""
        run = Run.open(folder).using(root=root)
        _, scores = calibrate_run(run, MARC(), images_per_class=few, seed=seed, overwrite=True)
        return 100 * scores[-1].after.balanced

    scoring = processor_seconds(lambda: Run.open(folder).using(root=root).outputs("test"))
    of_all = calibrate("all", 0)
    passes, taken = [], []
    accuracies: list[float] = []
    half = len(images) // 2
    forward(images[:1])
    for seed in range(rounds):
        before = processor_seconds(lambda: forward(images[:half]))
        own = processor_seconds(lambda seed=seed: accuracies.append(calibrate("auto", seed)))
        behind = processor_seconds(lambda: forward(images[half:]))
        passes.append(before + behind)
        taken.append(own)
    most = MARC().enough_images(len(run.class_counts))
    share = float(np.minimum(run.class_counts, most).sum() / run.class_counts.sum())
    ratios = [own / one for own, one in zip(taken, passes, strict=True)]
    changes = [accuracy - of_all for accuracy in accuracies]
    rest = [own - share * whole for own, whole in zip(taken, passes, strict=True)]
    one = statistics.median(passes)
    return [
        {
            "network": name,
            "images per class ≤": most,
            "% of images": 100 * share,
            "forward pass, s": one,
            "calibration / forward pass": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "all but the network, s": statistics.median(rest),
            "scoring 10,000 test images / forward pass": scoring / one,
            "accuracy, all images": of_all,
            "mean change": statistics.mean(changes),
            "least change": min(changes),
            "most change": max(changes),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[f"cifar10-lt-100-resnet32-seed{seed}" for seed in range(3)])
    parser.add_argument("--root", help="folder with CIFAR (default: unpacked once)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            root = arguments.root or str(cifar_root(name.split("-")[0]))
            rows += measure(name, root, arguments.rounds, Path(folder) / "run")
    write_results(
        "few_images",
        "A calibration on a few images of every class",
        rows,
        "`longtail calibrate RUN` with `--images-per-class auto`: open, extract, solve, fold, write. Median, least and "
        "most over rounds; in each the images are drawn anew. Every network is a training of its own. Asked for: ≤ "
        "0.20 forward passes, ≤ 0.1 points from all images, ≤ 0.5 s for everything but the network.",
        rounds=arguments.rounds,
    )


if __name__ == "__main__":
    main()
