"""Draw what each augmentation does to eight CIFAR-10 images: docs/results/augmentation.png.

python benchmarks/augmentation_picture.py --root FOLDER-OF-CIFAR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import longtail
from longtail.data.augment import AUGMENTATION_NAMES, RESIZED_CROP, build_transform

SHOWN = 8
OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "augmentation.png"


def augmented(pixels: torch.Tensor, name: str) -> torch.Tensor:
    """Eight images (8, 3, 32, 32) after one augmentation, by the library's own transform."""
    if name == "as they are":
        return pixels
    transform = build_transform((name,), (0.0,) * 3, (1.0,) * 3, image_size=32, seed=3)
    numbers = transform.numbers(np.arange(len(pixels)))
    decode = transform.decode
    assert decode is not None
    if name == RESIZED_CROP:
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
        cut = [np.asarray(decode(picture, row)) for picture, row in zip(pictures, numbers, strict=True)]
        return torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2)
    return transform.augment(pixels, torch.from_numpy(numbers[:, decode.columns :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="folder of CIFAR-10")
    root = parser.parse_args().root
    config = longtail.TrainConfig(data="cifar10", root=root, backbone="resnet8", epochs=1)
    images = longtail.data.open_splits(config).train
    places = [int((images.labels == label).nonzero()[0]) for label in range(SHOWN)]
    rows = ("as they are", *AUGMENTATION_NAMES)
    figure = Figure(figsize=(7.2, 0.82 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), SHOWN)
    for name, line in zip(rows, axes, strict=True):
        for axis, image in zip(line, augmented(images.pixels[places], name), strict=True):
            axis.imshow(image.permute(1, 2, 0).numpy())
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=110)
    print(f"written: {OUT}")


if __name__ == "__main__":
    main()
