"""How many images per class a method needs: test accuracy of fits on a few images per class, against all of them.

Real: features of a ResNet-32 on CIFAR-10-LT 100, one augmented view. Synthetic, with the real class counts of
CIFAR-100-LT 100 and ImageNet-LT: features around class means, and the biased head of `calibrate.py`; the test set
has as many samples of every class. Every number of images is drawn several times; each sample of a class counts as
many times as there are training images for each image taken, which is what the library does by itself.
"""

from __future__ import annotations

import argparse
import json
import warnings

import numpy as np
import torch
from common import shared_folder, write_results

from longtail import MARC, Outputs
from longtail.data.imbalance import subsample_per_class
from longtail.metrics.scores import evaluate
from longtail.posthoc import CRT, LWS, DisAlign
from longtail.posthoc.base import PostHoc

METHODS: dict[str, type[PostHoc]] = {"marc": MARC, "lws": LWS, "disalign": DisAlign, "crt": CRT}
SIGNAL = 0.3  # of the class means beside noise of 1: about as hard as the real sets are
POINTS = 0.1  # of balanced accuracy: no more may a fit on a few images be off
COUNTS = {
    "CIFAR-100-LT 100": "cifar100_exp_ir100.json",
    "ImageNet-LT": "robustlearn_ImageNet_LT.json",
}


def real() -> tuple[Outputs, Outputs]:
    """(train, test) of the ResNet-32."""
    with np.load(shared_folder() / "data" / "cifar10_lt100_resnet32_features.npz") as file:
        weight, bias = file["head_weight"].astype(np.float32), file["head_bias"].astype(np.float32)
        views, test = file["train_views"].astype(np.float32), file["test"].astype(np.float32)
        labels, test_labels = file["train_labels"].astype(np.int64), file["test_labels"].astype(np.int64)
    return _outputs(views[0], labels, weight, bias), _outputs(test, test_labels, weight, bias)


def synthetic(name: str, test_per_class: int = 50) -> tuple[Outputs, Outputs]:
    """(train, test) of a biased classifier on real class counts."""
    known = json.loads((shared_folder() / "golden/class_counts" / COUNTS[name]).read_text())
    counts = np.array(known["counts"] if isinstance(known, dict) else known)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(len(counts), 64, generator=generator)
    size = torch.from_numpy(counts / counts.max()).float()
    weight = (0.35 * means * (0.5 + 0.5 * size**0.15).unsqueeze(1)).numpy()
    bias = (0.3 * torch.from_numpy(np.log(counts / counts.mean())).float()).numpy()

    def draw(sizes: np.ndarray) -> Outputs:
        labels = np.repeat(np.arange(len(sizes)), sizes)
        features = SIGNAL * means[labels] + torch.randn(len(labels), 64, generator=generator)
        return _outputs(features.numpy(), labels, weight, bias)

    return draw(counts), draw(np.full(len(counts), test_per_class))


def _outputs(features: np.ndarray, labels: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Outputs:
    counts = np.bincount(labels, minlength=len(weight))
    logits = features @ weight.T + bias
    return Outputs(labels, counts, logits=logits, features=features, head_weight=weight, head_bias=bias)


def taken(train: Outputs, rows: np.ndarray) -> Outputs:
    """Some rows of the training outputs; the class counts stay those of all."""
    assert train.logits is not None
    assert train.features is not None
    known = {"head_weight": train.head_weight, "head_bias": train.head_bias}
    return Outputs(
        train.labels[rows], train.class_counts, logits=train.logits[rows], features=train.features[rows], **known
    )


def accuracy(method: PostHoc, train: Outputs, test: Outputs) -> float:
    calibrated = np.asarray(method.fit(train).transform(test))
    return 100 * evaluate(calibrated, test.labels, train.class_counts).balanced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["CIFAR-10-LT 100", *COUNTS])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--numbers", nargs="+", default=["500", "200", "100", "63", "50", "20"], help="or auto")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--name", default="images_per_class")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rows: list[dict[str, object]] = []
    for name in arguments.sets:
        train, test = real() if name not in COUNTS else synthetic(name)
        for method in arguments.methods:
            of_all = accuracy(METHODS[method](), train, test)
            for number in arguments.numbers:
                most = METHODS[method]().enough_images(train.num_classes) if number == "auto" else int(number)
                if most is None or most >= train.class_counts.max():
                    continue
                chosen = [subsample_per_class(train.labels, most, seed) for seed in range(arguments.draws)]
                lost = [accuracy(METHODS[method](), taken(train, some), test) - of_all for some in chosen]
                share = 100 * len(chosen[0]) / len(train)
                within = 100 * float(np.mean(np.abs(lost) <= POINTS + 1e-9))
                shown = (name, method, most, share, of_all, float(np.mean(lost)), min(lost), max(lost), within)
                columns = ("data", "method", "images per class ≤", "% of images", "accuracy, all images")
                columns += ("mean change", "least", "most", f"% of draws within {POINTS} points")
                rows.append(dict(zip(columns, shown, strict=True)))
                print(rows[-1], flush=True)
    write_results(
        arguments.name,
        "Images per class that a calibration needs",
        rows,
        "Change of balanced test accuracy in points, over draws of the images, against the fit on all images. "
        "CIFAR-10-LT: real features of a ResNet-32. The others: synthetic features with the real class counts. "
        "`auto` keeps within 0.1 points of all images in the mean of the draws. A single draw can be further off: "
        "0.1 points are ten test images of CIFAR-10. LWS, DisAlign and cRT take all images with `auto`.",
        draws=arguments.draws,
    )


if __name__ == "__main__":
    main()
