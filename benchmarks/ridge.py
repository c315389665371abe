"""What the ridge of MARC does at 10, 100 and 1,000 classes: stated per number, or multiplied by 10 / K as it is now.

Real features of a ResNet-32 on CIFAR-10-LT 100; logits as a biased classifier gives them, made with the class
counts of CIFAR-100-LT 100 and of ImageNet-LT (synthetic). Runs of your own are added with --runs RUN ….
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import cifar_root, shared_folder, write_results

from longtail import MARC, Outputs, Run, evaluate
from longtail.data.imbalance import long_tail_counts
from longtail.posthoc.base import PostHoc

RIDGE = 5e-4
NOTES = """Test images are held out and balanced; ECE and balanced accuracy in per cent; passes over the training logits
that the solver needs. "per number" adds the same 5e-4 to each of the 2K numbers, whatever K; "times 10 / K" is the
default: at ten classes the two are the same. A class has about 1 / K of the mean loss, so that a ridge per number
weighs K / 10 times as much beside it as at ten classes: it flattens the probabilities. "sgd" is the paper's stage two,
2,000 steps of 512 with its weight decay per number: at ten classes it agrees with "exact", at more it is less sure."""


def synthetic(counts: np.ndarray, per_class: int) -> tuple[Outputs, Outputs]:
    """Training and held-out logits of a biased classifier: head classes have longer vectors and larger biases."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(len(counts), 64)).astype(np.float32)
    weight = 0.35 * means * (0.5 + 0.5 * (counts / counts.max()) ** 0.15).astype(np.float32)[:, None]
    bias = (0.3 * np.log(counts / counts.mean())).astype(np.float32)

    def outputs(sizes: np.ndarray, split: str) -> Outputs:
        labels = np.repeat(np.arange(len(counts)), sizes)
        features = 0.6 * means[labels] + rng.normal(size=(len(labels), 64)).astype(np.float32)
        logits = (features @ weight.T + bias).astype(np.float32)
        return Outputs(labels, counts, logits=logits, head_weight=weight, head_bias=bias, split=split)

    return outputs(counts, "train"), outputs(np.full(len(counts), per_class), "test")


def cifar_features() -> tuple[Outputs, Outputs]:
    """One augmented view of the training images, and the test images, of a real network."""
    with np.load(shared_folder() / "data" / "cifar10_lt100_resnet32_features.npz") as file:
        arrays = {name: file[name] for name in file.files}
    head = {name: arrays[name].astype(np.float32) for name in ("head_weight", "head_bias")}
    labels = arrays["train_labels"].astype(np.int64)
    features = {"train": arrays["train_views"][0], "test": arrays["test"]}
    of = {"train": labels, "test": arrays["test_labels"].astype(np.int64)}
    train, test = (
        Outputs(of[split], np.bincount(labels), features=features[split].astype(np.float32), split=split, **head)
        for split in ("train", "test")
    )
    return train, test


def of_run(folder: Path) -> tuple[Outputs, Outputs]:
    run = Run.open(folder)
    run = run.using(root=str(cifar_root(run.config.data)))
    return run.outputs("train", views=1), run.outputs("test")


def rows_of(data: str, train: Outputs, test: Outputs) -> list[dict[str, Any]]:
    classes = train.num_classes
    settings: dict[str, PostHoc | None] = {
        "none: as trained": None,
        "per number": MARC(ridge=RIDGE * classes / 10),
        "times 10 / K": MARC(ridge=RIDGE),
        "sgd": MARC(solver="sgd"),
    }
    rows = []
    for name, marc in settings.items():
        logits = test.rows().read(slice(None)).numpy() if marc is None else np.asarray(marc.fit(train).transform(test))
        metrics = evaluate(logits, test.labels, test.class_counts)
        assert metrics.ece is not None
        row = {"data": data, "K": classes, "ridge": name, "balanced accuracy": round(100 * metrics.balanced, 1)}
        row |= {"ECE": round(100 * metrics.ece, 1), "NLL": metrics.nll}
        row["passes"] = marc.result_.iterations if marc is not None and name != "sgd" else None
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="finished Softmax runs on CIFAR")
    arguments = parser.parse_args()
    imagenet = json.loads((shared_folder() / "golden/class_counts/robustlearn_ImageNet_LT.json").read_text())
    rows = rows_of("CIFAR-10-LT 100 (real)", *cifar_features())
    for folder in arguments.runs:
        config = Run.open(folder).config
        name = f"{config.data}-LT {config.imbalance:g}, {config.backbone}, {config.epochs:g} epochs (real run)"
        rows += rows_of(name, *of_run(folder))
    rows += rows_of("synthetic, counts of CIFAR-100-LT 100", *synthetic(long_tail_counts(100, 500, 100, "exp"), 100))
    rows += rows_of("synthetic, counts of ImageNet-LT", *synthetic(np.array(imagenet), 10))
    write_results("ridge", "The ridge at many classes", rows, NOTES)


if __name__ == "__main__":
    main()
