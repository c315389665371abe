"""Every post-hoc method at imbalance 1:10 to 1:10,000 and 2 to 1,000 classes: harm is warned of, or does not occur.

    python benchmarks/trap_imbalance.py

The large sizes of `tests/posthoc/test_imbalance.py`. The program ends with an error if a method does harm in silence.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from fault_tools import record
from scipy.special import log_softmax

from longtail.methods import POSTHOC_METHODS
from longtail.metrics.scores import ranking_scores
from longtail.posthoc.gate import FitWarning


@dataclass(frozen=True)
class Blobs:
    """Gaussian classes of one imbalance, and the best linear classifier of them."""

    classes: int
    ratio: int
    most: int

    def draw(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Class counts (K,); features, logits and labels of training, held-out and balanced test samples."""
        rng = np.random.default_rng(0)
        counts = np.maximum((self.most * self.ratio ** (-np.arange(self.classes) / (self.classes - 1))).round(), 2)
        means = rng.normal(size=(self.classes, 16)) * (0.35 if self.classes == 2 else 0.7)
        bias = np.log(counts / counts.sum()) - np.square(means).sum(1) / 2

        def some(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            labels = np.repeat(np.arange(self.classes), sizes.astype(int))
            features = (means[labels] + rng.normal(size=(len(labels), 16))).astype(np.float32)
            logits = features @ means.T + bias
            return features, (logits - logits.mean(1, keepdims=True)).astype(np.float32), labels

        test = np.full(self.classes, max(4000 // self.classes, 4))
        return counts, [some(counts), some(np.maximum(counts // 3, 2)), some(test)]


GRID = [
    *(Blobs(2, ratio, most) for ratio, most in ((10, 10_000), (100, 20_000), (1000, 60_000), (10_000, 100_000))),
    *(Blobs(10, ratio, most) for ratio, most in ((10, 1000), (100, 2000), (1000, 10_000), (10_000, 20_000))),
    *(Blobs(100, ratio, most) for ratio, most in ((10, 100), (100, 200), (1000, 1000))),
    Blobs(1000, 10, 30),
    Blobs(1000, 100, 100),
]
SMALL_ONLY = {"crt": 10, "disalign": 10, "matrix": 100}  # classes up to which they are tried: they take long


def mean_auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean over classes, at most 30, of the one-versus-rest AUC of the log-odds."""
    scores = log_softmax(logits.astype(np.float64), axis=1)
    scores = scores - np.log(-np.expm1(np.minimum(scores, -1e-300)))
    chosen = np.unique(labels)[:: max(logits.shape[1] // 30, 1)]
    return float(np.mean([ranking_scores(scores[:, label], labels == label)[0] for label in chosen]))


def imbalance_rows() -> list[dict[str, Any]]:
    """Every post-hoc method at every imbalance and number of classes: AUC, and the largest share of predictions."""
    rows = []
    for blobs in GRID:
        counts, (train, held, test) = blobs.draw()
        for name, entry in POSTHOC_METHODS.items():
            if blobs.classes > SMALL_ONLY.get(name, blobs.classes):
                continue
            method = entry.estimator()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if method.fitted_on_unseen:
                    method.fit(held[1], held[2], class_counts=counts)
                else:
                    held_out = (held[1], held[2], held[0])
                    method.fit(train[1], train[2], features=train[0], validation=held_out)
            features, before, labels = test
            after = np.asarray(method.transform(before, features=features))
            balanced = 1 / np.bincount(labels)[labels]
            shares = [np.bincount(one.argmax(1), balanced).max() / balanced.sum() for one in (before, after)]
            before_auc, after_auc = mean_auc(before, labels), mean_auc(after, labels)
            warned = any(issubclass(one.category, FitWarning) for one in caught)
            accuracies = [((one.argmax(1) == labels) @ balanced) / balanced.sum() for one in (before, after)]
            ranked = after_auc > before_auc - 0.01 or (blobs.classes > 2 and accuracies[1] > accuracies[0])
            kept = ranked and shares[1] < max(0.85, shares[0] + 0.01)
            rows.append(
                {
                    "classes": blobs.classes,
                    "imbalance": f"1:{blobs.ratio:,}",
                    "method": name,
                    "AUC before": f"{before_auc:.3f}",
                    "AUC after": f"{after_auc:.3f}",
                    "balanced accuracy before, after": f"{accuracies[0]:.3f}, {accuracies[1]:.3f}",
                    "most predicted before": f"{shares[0]:.2f}",
                    "most predicted after": f"{shares[1]:.2f}",
                    "end": "warned" if warned else "correct" if kept else "WRONG",
                }
            )
            print(" | ".join(map(str, rows[-1].values())), flush=True)
        record("imbalance", rows, IMBALANCE)  # size by size: the last ones take longest
    return rows


IMBALANCE = (
    "Every post-hoc method on Gaussian classes, of which the model is the best linear classifier: mean AUC of one "
    "class against the others, and the largest share of predictions, on balanced test samples. The AUC falls by at "
    "most 0.01 (of more than two classes: or more of the samples are recognised), and no class takes more than 85 % of "
    "the predictions unless it did before, or the fit warns. cRT and "
    "DisAlign are tried up to 10 classes, matrix scaling up to 100."
)


def main() -> None:
    if any(row["end"] == "WRONG" for row in imbalance_rows()):
        sys.exit("a method does harm without a word")


if __name__ == "__main__":
    main()
