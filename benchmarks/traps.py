"""Traps: data that are not what they seem, through every door of the library. None may end wrong without a word.

    python benchmarks/traps.py

Each trap is made from the same sound logits, which calibrate well. It goes through the array API, `calibrate(model,
loader)`, `longtail calibrate` on saved logits, and `CalibratedLongTail`. It must be refused in one line, warned of, or
answered as well as the sound data: the balanced accuracy on test samples is at most two points lower. Sound data in
another form must be answered without a warning. The row is wrong otherwise, and the program ends with an error.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fault_tools import record
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import nn

import longtail
from longtail.cli import main as command
from longtail.errors import UserError
from longtail.posthoc.gate import FitWarning
from longtail.sklearn import CalibratedLongTail

ALLOWED = 0.02  # balanced accuracy


@dataclass(frozen=True)
class Samples:
    """Logits (N, K) and labels (N,) to fit on, class counts (K,), and the logits of balanced test samples."""

    logits: np.ndarray
    labels: np.ndarray
    counts: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray

    def both(self, change: Callable[[np.ndarray], np.ndarray]) -> Samples:
        """The same change of the logits to fit on and of the test logits."""
        return replace(self, logits=change(self.logits), test=change(self.test))


def sound(counts: tuple[int, ...], seed: int = 0) -> Samples:
    """The best classifier of Gaussian classes, right for classes as they occur."""
    rng = np.random.default_rng(seed)
    means = 2.0 * np.eye(len(counts))

    def draw(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.permutation(np.repeat(np.arange(len(counts)), sizes))
        features = means[labels] + rng.normal(size=(len(labels), len(counts)))
        return (features @ means.T + np.log(np.array(counts) / sum(counts))).astype(np.float32), labels

    return Samples(*draw(np.array(counts)), np.array(counts), *draw(np.full(len(counts), 500)))


FOUR, RARE = sound((600, 200, 60, 20)), sound((4950, 50))


def permuted(data: Samples) -> Samples:
    return replace(data, labels=np.random.default_rng(1).permutation(data.labels))


def one_row_off(logits: np.ndarray) -> np.ndarray:
    logits = softmax(logits, axis=1)
    logits[0] *= 0.5
    return logits


def with_value(value: float) -> Samples:
    logits = FOUR.logits.copy()
    logits[7, 1] = value
    return replace(FOUR, logits=logits)


def with_label(value: int) -> Samples:
    labels = FOUR.labels.copy()
    labels[7] = value
    return replace(FOUR, labels=labels)


def noise(logits: np.ndarray) -> np.ndarray:
    return np.asarray(np.random.default_rng(2).normal(size=logits.shape, scale=3.0), dtype=np.float32)


ROW = np.random.default_rng(3).normal(size=(10_000, 1)).astype(np.float32)
# What was done, and the samples.
TRAPS: dict[str, Samples] = {
    "labels in a random order": permuted(FOUR),
    "labels in a random order, 1 in 100 positive": permuted(RARE),
    "labels one row late": replace(FOUR, labels=np.roll(FOUR.labels, 1)),
    "labels one row late, 1 in 100 positive": replace(RARE, labels=np.roll(RARE.labels, 1)),
    "labels 0 and 1 exchanged, 1 in 100 positive": replace(
        RARE, labels=1 - RARE.labels, counts=RARE.counts[::-1].copy()
    ),
    "columns in another order": FOUR.both(lambda logits: logits[:, [2, 0, 3, 1]]),
    "two columns exchanged": FOUR.both(lambda logits: logits[:, [1, 0, 2, 3]]),
    "signs reversed": FOUR.both(np.negative),
    "probabilities": FOUR.both(lambda logits: softmax(logits, axis=1)),
    "probabilities, one row sums to 1/2": FOUR.both(one_row_off),
    "probabilities rounded to two digits": FOUR.both(lambda logits: softmax(logits, axis=1).round(2)),
    "percentages": FOUR.both(lambda logits: 100 * softmax(logits, axis=1)),
    "sigmoids": FOUR.both(expit),
    "logits times 0.001": FOUR.both(lambda logits: 0.001 * logits),
    "sound: logits times 1,000": FOUR.both(lambda logits: 1000 * logits),
    "class counts reversed": replace(FOUR, counts=FOUR.counts[::-1].copy()),
    "class counts rotated": replace(FOUR, counts=np.roll(FOUR.counts, 1)),
    "every row the same": FOUR.both(lambda logits: np.broadcast_to(logits[:1], logits.shape).copy()),
    "a collapsed model (rows differ by 1e-7)": FOUR.both(lambda logits: logits[:1] + 1e-7 * logits),
    "random logits": FOUR.both(noise),
    "one logit is NaN": with_value(np.nan),
    "one logit is infinite": with_value(np.inf),
    "one label is K": with_label(4),
    "one label is -1": with_label(-1),
    "sound: log-probabilities": FOUR.both(lambda logits: np.log(softmax(logits, axis=1))),
    "sound: a constant added to each row": FOUR.both(lambda logits: logits + ROW[: len(logits)]),
    "sound: 1 in 100 positive": RARE,
}


class Passing(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose scores are its inputs."""

    def fit(self, scores: np.ndarray, labels: np.ndarray) -> Passing:
        self.classes_ = np.arange(scores.shape[1])
        return self

    def decision_function(self, scores: np.ndarray) -> np.ndarray:
        return scores if scores.shape[1] > 2 else scores[:, 1] - scores[:, 0]


def by_arrays(data: Samples, folder: Path) -> np.ndarray:
    method = longtail.MARC().fit(data.logits, data.labels, class_counts=data.counts)
    return np.asarray(method.predict(data.test))


def by_calibrate(data: Samples, folder: Path) -> np.ndarray:
    model = nn.Linear(data.logits.shape[1], data.logits.shape[1])
    with torch.no_grad():
        model.weight.copy_(torch.eye(len(model.weight)))
        model.bias.zero_()
    inputs, labels = torch.from_numpy(np.array(data.logits)), torch.from_numpy(data.labels)
    loader = list(zip(inputs.split(128), labels.split(128), strict=True))
    calibrated, _ = longtail.calibrate(model, loader, class_counts=data.counts, device="cpu", progress=False)
    return calibrated(torch.from_numpy(np.array(data.test))).argmax(1).numpy()


def by_command(data: Samples, folder: Path) -> np.ndarray:
    arrays = {"logits": data.logits, "labels": data.labels, "class_counts": data.counts}
    np.savez(folder / "train.npz", **arrays)
    np.savez(folder / "test.npz", **{**arrays, "logits": data.test, "labels": data.test_labels})
    words = ["calibrate", str(folder / "train.npz"), "--test", str(folder / "test.npz"), "--out", str(folder / "out")]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = command([*words, "--overwrite", "--quiet"])
    lines = said.getvalue().splitlines()
    if code:
        assert (code, len(lines)) == (2, 1), said.getvalue()
        raise UserError(lines[-1])
    for line in lines:
        warnings.warn(line, FitWarning, stacklevel=1)
    return longtail.Outputs.open(folder / "out" / "test-calibrated.safetensors").logits.argmax(1)


def by_sklearn(data: Samples, folder: Path) -> np.ndarray:
    estimator = Passing().fit(data.logits, data.labels)
    wrapper = CalibratedLongTail(estimator, cv="prefit").fit(data.logits, data.labels, class_counts=data.counts)
    return np.asarray(wrapper.predict(data.test))


DOORS = {
    "arrays": by_arrays,
    "calibrate(model, loader)": by_calibrate,
    "longtail calibrate": by_command,
    "CalibratedLongTail": by_sklearn,
}


def balanced_accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean([(predicted[labels == label] == label).mean() for label in np.unique(labels)]))


def examine(action: Callable[[], np.ndarray], labels: np.ndarray, expected: float) -> tuple[str, str]:
    """How a trap ended, and the first words that were said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            predicted = action()
        except (UserError, ValueError) as error:
            return ("WRONG" if "\n" in str(error) else "refused"), str(error)
    said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    if said:
        return "warned", said[0]
    reached = balanced_accuracy(predicted, labels)
    return ("correct" if reached > expected - ALLOWED else "WRONG"), f"balanced accuracy {reached:.3f}"


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        best = {len(data.counts): balanced_accuracy(by_arrays(data, folder), data.test_labels) for data in (FOUR, RARE)}
        for what, data in TRAPS.items():
            for door, answer in DOORS.items():
                end, said = examine(lambda: answer(data, folder), data.test_labels, best[len(data.counts)])  # noqa: B023
                expected = "correct" if what.startswith("sound") else "refused or warned"
                words = (
                    said.replace(f"{folder}/", "")
                    .removeprefix("longtail: ")
                    .removeprefix("warning: ")
                    .replace("|", "/")
                )
                rows.append({"trap": what, "door": door, "expected": expected, "end": end, "said": words[:90]})
                print(" | ".join(rows[-1].values()), flush=True)
    if any(row["end"] == "WRONG" or (row["end"] != "correct") == (row["expected"] == "correct") for row in rows):
        sys.exit("some traps ended wrong without a word")
    record("traps", rows, __doc__.split("\n\n")[2].replace("\n", " ").strip())


if __name__ == "__main__":
    main()
