"""How fast training is, beside what limits it and beside the usual way.

Three loops take turns on the same network, optimiser and batch size:
- the step on one fixed batch in memory: nothing can be faster;
- `longtail`'s loop on CIFAR-10 with crop, flip, AutoAugment and Cutout;
- a plain NCHW loop fed image by image through Pillow by a DataLoader.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import cifar_root, seconds, write_results
from PIL import Image, ImageEnhance, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset

from longtail.data.autoaugment import CIFAR_POLICY, FILL, OPERATIONS
from longtail.distributed import World
from longtail.files.progress import Display
from longtail.recipes import RECIPES
from longtail.runs.network import build_network
from longtail.training.loop import Trainer
from longtail.training.setup import TrainingStep

ENHANCERS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}


class PillowImages(Dataset):
    """CIFAR through Pillow, image by image: crop, flip, AutoAugment, to a tensor, Cutout, normalise."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, mean: list[float], std: list[float]) -> None:
        self.pixels = pixels.transpose(0, 2, 3, 1)
        self.labels = labels
        self.mean, self.std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = ImageOps.expand(Image.fromarray(self.pixels[index]), 4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        picture = picture.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            picture = ImageOps.mirror(picture)
        for name, probability, strength in random.choice(CIFAR_POLICY):
            if random.random() < probability:
                picture = self.operate(picture, name, strength)
        image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255)
        y, x = random.randrange(32), random.randrange(32)
        image[:, max(y - 8, 0) : y + 8, max(x - 8, 0) : x + 8] = 0
        return (image - self.mean) / self.std, int(self.labels[index])

    def operate(self, picture: Image.Image, name: str, strength: int) -> Image.Image:
        _, weakest, strongest, signed = OPERATIONS[name]
        number = weakest + (strongest - weakest) * strength / 9
        number *= random.choice((-1, 1)) if signed else 1
        if name in ENHANCERS:
            return ENHANCERS[name](picture).enhance(1 + number)
        if name == "posterize":
            return ImageOps.posterize(picture, round(number))
        if name == "solarize":
            return ImageOps.solarize(picture, number)
        if name == "rotate":
            return picture.rotate(number, fillcolor=(FILL,) * 3)
        matrices = {
            "shear_y": (1, 0, 0, number, 1, 0),
            "translate_x": (1, 0, number * 32, 0, 1, 0),
            "translate_y": (1, 0, 0, 0, 1, number * 32),
        }
        if name in matrices:
            return picture.transform((32, 32), Image.Transform.AFFINE, matrices[name], fillcolor=(FILL,) * 3)
        return {"autocontrast": ImageOps.autocontrast, "equalize": ImageOps.equalize, "invert": ImageOps.invert}[name](
            picture
        )


def ours(trainer: Trainer) -> Iterator[None]:
    step = TrainingStep(trainer.state.model, trainer.state.objective)
    for batches in trainer._batches():
        trainer.journal.add(trainer._step(step, batches))
        yield


def fixed(trainer: Trainer) -> Iterator[None]:
    step = TrainingStep(trainer.state.model, trainer.state.objective)
    batches = next(trainer._batches())
    while True:
        trainer._step(step, batches)
        yield


def plain(trainer: Trainer, workers: int) -> Iterator[None]:
    train, clean = trainer.splits.train, trainer.setup.clean
    images = PillowImages(train.pixels.numpy(), train.labels.numpy(), clean.mean, clean.std)
    config = trainer.config
    loader = DataLoader(images, config.batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    model, _ = build_network(config, train.class_counts, 3)
    optimizer = torch.optim.SGD(model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)
    loss_function = nn.CrossEntropyLoss()
    while True:
        for pixels, labels in loader:
            loss = loss_function(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="steps of each loop in a round")
    parser.add_argument("--batch-size", type=int, default=128)
    arguments = parser.parse_args()
    recipe, size = RECIPES["cifar10-lt-100"], arguments.batch_size
    config = replace(recipe, root=str(cifar_root()), batch_size=size, device="cpu", iterations=10**6)
    world = World(0, 1, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        trainers = [Trainer(config, Path(folder) / str(i), world, Display(quiet=True)) for i in range(2)]
        loops = {
            "one fixed batch in memory": fixed(trainers[0]),
            "longtail": ours(trainers[1]),
            "plain NCHW, Pillow per image, no workers": plain(trainers[0], 0),
            "plain NCHW, Pillow per image, 2 workers": plain(trainers[0], 2),
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(arguments.rounds + 1):
            for name, loop in loops.items():
                taken = seconds(lambda loop=loop: [next(loop) for _ in range(arguments.steps)])
                if number:  # the first round warms up
                    times[name].append(taken)
    images = arguments.steps * arguments.batch_size
    limit = times["one fixed batch in memory"]
    rows = []
    for name, taken in times.items():
        share = statistics.median(a / b for a, b in zip(limit, taken, strict=True))
        speedup = statistics.median(b / a for a, b in zip(times["longtail"], taken, strict=True))
        speed = images / statistics.median(taken)
        rows.append({"loop": name, "images/s": speed, "share of the limit": share, "longtail is faster by": speedup})
    write_results(
        "train_throughput",
        "Training throughput",
        rows,
        f"ResNet-32, CIFAR-10-LT 100, batch {size}, SGD; medians over {arguments.rounds} rounds in turn. "
        "Asked for: longtail at ≥ 0.95 of the limit and ≥ 1.2 x the plain loop.",
    )


if __name__ == "__main__":
    main()
