"""Probe beside the heads that people fit on frozen features, on the same features.

    python benchmarks/probe.py digits languages regions packages docstrings frozen     measure what is not kept yet
    python benchmarks/probe.py packages --draws 2 --again Probe                         one method anew
    python benchmarks/probe.py cost imagenet-lt imagenet-lt-mapped                 seconds and memory
    python benchmarks/probe.py page                                                     write docs/results/probe.md

The features are described in probe_cases.py. What was measured is kept in LONGTAIL_FEATURES (default:
benchmarks/.data), each score with its commit, and the page is written from it.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import peak_memory_mb, restart_peak_memory, write_results
from halo_cases import KEPT
from probe_cases import CASES, Draw, drawn, imagenet_lt, long_tail
from scipy.special import log_softmax
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from longtail import HALO, MARC, Outputs, Probe
from longtail.files.records import provenance
from longtail.metrics.intervals import Interval, over_seeds, paired_difference
from longtail.posthoc import CRT, LWS

STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
BINS = 15
SIMULATED = 20
TEXT = ("languages", "regions", "packages", "docstrings")
METHODS = (
    "Probe",
    "Logistic regression",
    "Logistic regression + logit adjustment",
    "Logistic regression, balanced",
    "LDA, shrunk",
    "10 nearest neighbours",
    "cRT",
    "HALO, cross-fitted",
    "MARC",
    "LWS",
)
Logits = tuple[np.ndarray, np.ndarray]  # for equal classes and for the training prior; the same without a target prior


def logistic(features: np.ndarray, labels: np.ndarray, **settings: Any) -> LogisticRegression:
    """Logistic regression whose C has the greatest likelihood on a held-out fifth."""
    several = np.bincount(labels)[labels] > 4
    fitted, held = train_test_split(np.flatnonzero(several), test_size=0.2, stratify=labels[several], random_state=0)
    fitted = np.concatenate([fitted, np.flatnonzero(~several)])
    best, loss = STRENGTHS[0], np.inf
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=300, tol=1e-3, **settings)
        shares = model.fit(features[fitted], labels[fitted]).predict_log_proba(features[held])
        own = -np.average(shares[np.arange(len(held)), labels[held]])
        if own > loss:
            break
        best, loss = strength, own
    return LogisticRegression(C=best, max_iter=300, tol=1e-3, **settings).fit(features, labels)


def fits(draw: Draw, kept: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Logits]]]:
    """Name of each method, and what fits it and gives logits (N, K) of the test samples; `kept` holds its models."""
    features, labels, test, truth = draw
    centre, size = features.mean(0), features.std()
    near, near_test = ((part - centre) / size for part in (features, test))
    counts = np.bincount(labels)
    prior, equal = np.log(counts / counts.sum()), np.full(len(counts), 1 / len(counts))

    def probe() -> Logits:
        kept["probe"] = Probe().fit(features, labels)
        balanced, natural = (kept["probe"].with_target_prior(q).decision_function(test) for q in ("uniform", "train"))
        return balanced, natural

    def plain() -> LogisticRegression:
        if "plain" not in kept:
            kept["plain"] = logistic(near, labels)
        return kept["plain"]

    def outputs(part: np.ndarray, own: np.ndarray, split: str) -> Outputs:
        model, inputs = plain(), part.astype(np.float32)
        head = {"head_weight": model.coef_.astype(np.float32), "head_bias": model.intercept_.astype(np.float32)}
        logits = inputs @ head["head_weight"].T + head["head_bias"]
        return Outputs(own, counts, logits=logits, features=inputs, split=split, **head)

    def after(method: Any) -> Callable[[], Logits]:
        def fit() -> Logits:
            method.fit(outputs(near, labels, "train"))
            new = outputs(near_test, truth, "test")
            at = [method.with_target_prior(q) for q in ("uniform", "train")] if isinstance(method, HALO) else [method]
            logits = [np.asarray(one.transform(new)) for one in at]
            return logits[0], logits[-1]

        return fit

    def scored(model: Any, shift: np.ndarray | float = 0.0) -> Logits:
        logits = model.decision_function(near_test)
        return logits + shift, logits

    def neighbours() -> Logits:
        votes = KNeighborsClassifier(10, weights="distance").fit(near, labels).predict_proba(near_test)
        logs = np.log(np.clip(votes, 1e-6, None))
        return logs - prior, logs

    shrunk = LinearDiscriminantAnalysis("lsqr", shrinkage="auto", priors=equal)
    yield "Probe", probe
    yield "Logistic regression", lambda: scored(plain())
    plain()  # the methods below do not pay for it
    yield "Logistic regression + logit adjustment", lambda: scored(plain(), -prior)
    yield "Logistic regression, balanced", lambda: scored(logistic(near, labels, class_weight="balanced"))
    yield "LDA, shrunk", lambda: (scored(shrunk.fit(near, labels))[0], scored(shrunk.fit(near, labels), prior)[0])
    yield "10 nearest neighbours", neighbours
    yield "cRT", after(CRT())
    yield "HALO, cross-fitted", after(HALO(held_out="cross-fit"))
    yield "MARC", after(MARC())
    yield "LWS", after(LWS())


def calibration_error(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """ECE of weighted samples in per cent, and that of right probabilities: what so few samples cause by chance."""
    shares = np.exp(log_softmax(logits.astype(np.float64), axis=1))
    confidence, correct = shares.max(1), shares.argmax(1) == labels
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    rng = np.random.default_rng(0)
    drawn = [rng.random(len(confidence)) < confidence for _ in range(SIMULATED)]
    error, *chance = (np.abs(np.bincount(bins, weights * (confidence - hit), BINS)).sum() for hit in (correct, *drawn))
    return 100 * float(error), 100 * float(np.mean(chance))


def measure(part: str, seed: int, again: list[str]) -> None:
    """Keep the scores of every method on a draw that are not kept yet, or are wanted again."""
    found = kept_scores(part, seed)
    draw, models = CASES[part][0](seed), {}
    labels, counts = draw[3], np.bincount(draw[1])
    balanced = 1 / np.bincount(labels)[labels] / len(counts)
    natural = (counts / counts.sum())[labels] * balanced * len(counts)
    wanted = [name for name in METHODS if name not in found or name in again]
    for name, fit in fits(draw, models):
        if not wanted:
            break
        if name not in wanted:
            continue
        wanted.remove(name)
        began = time.process_time()
        at_equal, at_training = fit()
        seconds = time.process_time() - began
        hit = at_equal.argmax(1) == labels
        row = {
            "balanced": 100 * float(balanced @ hit),
            "ece": calibration_error(at_equal, labels, balanced),
            "natural": 100 * float(natural @ (at_training.argmax(1) == labels)),
            "natural_ece": calibration_error(at_training, labels, natural),
            "seconds": seconds,
            "hit": base64.b64encode(np.packbits(hit).tobytes()).decode(),
            "commit": provenance()["commit"],
        }
        if name == "Probe":
            result = models["probe"].result_
            estimates = {"natural": result.natural, "balanced": result.balanced}
            row["held"] = {prior: bool(one.low <= row[prior] / 100 <= one.high) for prior, one in estimates.items()}
        shown = " ".join(str(np.round(row[key], 2)) for key in ("balanced", "ece", "natural", "natural_ece", "seconds"))
        print(f"{part} {seed} {name}: {shown}", file=sys.stderr, flush=True)
        found[name] = row
        keep(f"{part}-{seed}", found)


def kept_scores(part: str, seed: int) -> dict[str, Any]:
    path = KEPT / f"probe-{part}-{seed}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def keep(name: str, found: Any) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"probe-{name}.json").write_text(json.dumps(found))


def rows_of(part: str) -> list[dict[str, Any]]:
    """The rows of the page: means over the draws that every method has."""
    draws = [found for seed in range(100) if set(METHODS) <= set(found := kept_scores(part, seed))]
    rows = []
    for name in METHODS if draws else []:
        own = [draw[name] for draw in draws]
        mean = {key: np.mean([one[key] for one in own], 0) for key in ("balanced", "ece", "natural", "natural_ece")}
        gain = difference(part, draws, name)
        bounds = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
        rows.append(
            {
                "features": f"{part}, draws: {len(draws)}",
                "method": name,
                "balanced": f"{mean['balanced']:.1f}",
                "ECE, equal classes": "{:.1f} ({:.1f})".format(*mean["ece"]),
                "natural": f"{mean['natural']:.1f}",
                "ECE, training prior": "{:.1f} ({:.1f})".format(*mean["natural_ece"]),
                "processor s": f"{np.mean([one['seconds'] for one in own]):.1f}",
                "Probe minus it, balanced": "" if name == "Probe" else f"{gain.value:+.2f}{bounds}",
            }
        )
    return rows


def difference(part: str, draws: list[dict[str, Any]], name: str) -> Interval:
    """Of the balanced accuracy of Probe and a method, over draws; of the same test images, over them, too."""
    if part != "frozen":
        return over_seeds([draw["Probe"]["balanced"] - draw[name]["balanced"] for draw in draws])
    labels = CASES[part][0](0)[3]
    hits = (
        np.stack([np.unpackbits(np.frombuffer(base64.b64decode(draw[one]["hit"]), np.uint8)) for draw in draws])
        for one in ("Probe", name)
    )
    gain = paired_difference(*(hit[:, : len(labels)] for hit in hits), labels)
    return Interval(*(None if value is None else 100 * value for value in (gain.value, gain.low, gain.high)))  # type: ignore[arg-type]


def together() -> dict[str, str]:
    """Probe minus HALO in the mean over the texts, and how often the intervals of the estimates held."""
    by_part = {part: [kept_scores(part, seed) for seed in range(100)] for part in CASES}
    notes = {}
    complete = zip(*(by_part[part] for part in TEXT), strict=True)
    complete = [draws for draws in complete if all(set(METHODS) <= set(draw) for draw in draws)]
    for name in ("HALO, cross-fitted", "Logistic regression + logit adjustment"):
        if len(complete) > 2:
            gains = [np.mean([d["Probe"]["balanced"] - d[name]["balanced"] for d in draws]) for draws in complete]
            gain = over_seeds(gains)
            notes[f"Probe minus {name}, balanced, mean of the texts"] = (
                f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] over {len(gains)} draws"
            )
    held = {part: [draw["Probe"]["held"] for draw in draws if "Probe" in draw] for part, draws in by_part.items()}
    notes["coverage"] = "the 95 % interval of the estimate holds the accuracy on test samples in " + "; ".join(
        f"{sum(one['natural'] for one in own)} (training prior) and {sum(one['balanced'] for one in own)} "
        f"(equal classes) of {len(own)} draws of {part}"
        for part, own in held.items()
        if own
    )
    return notes


def cost() -> str:
    """Processor seconds at 20,000 x 1,280 with 200 classes, beside a search over C by scikit-learn."""
    features, labels = drawn(long_tail(20_000, 200), 1280, "float32")
    began = time.process_time()
    probe = Probe().fit(features, labels)
    ours, began = time.process_time() - began, time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LogisticRegressionCV(Cs=list(STRENGTHS), cv=5, max_iter=300, tol=1e-3, scoring="neg_log_loss").fit(
            features, labels
        )
    theirs = time.process_time() - began
    return (
        f"{len(labels):,} x 1,280, 200 classes, one thread: Probe {ours:.0f} processor seconds "
        f"({probe.result_.passes} passes); scikit-learn's LogisticRegressionCV, six values of C in five folds, "
        f"{theirs:.0f}: {ours / theirs:.2f} times"
    )


def imagenet_size(dtype: str, *, mapped: bool) -> str:
    """Processor minutes and memory at the size of ImageNet-LT."""
    features, labels = drawn(imagenet_lt(), 2048, dtype)
    size = features.nbytes / 2**20
    with tempfile.TemporaryDirectory() as folder:
        if mapped:
            np.save(Path(folder) / "features.npy", features)
            del features
            features = np.load(Path(folder) / "features.npy", mmap_mode="r")
        before = restart_peak_memory() - (0 if mapped else size)  # of Python and its libraries
        began = time.process_time()
        result = Probe().fit(features, labels).result_
        used, memory = (time.process_time() - began) / 60, peak_memory_mb() - before
    where = "a memory-mapped file, whose pages are counted" if mapped else "memory"
    return (
        f"{len(labels):,} x 2,048, 1,000 classes, {dtype} in {where} ({size:.0f} MB): {used:.1f} processor minutes on "
        f"one thread, {result.passes} passes, {result.held_out:,} samples held out; features and fit take "
        f"{memory:.0f} MB at most, {memory / size:.2f} times the features, beside {before:.0f} MB of Python"
    )


NOTES = (
    "Linear heads on the same features, all on one thread. Per cent. *balanced*: mean accuracy of classes; *natural*: "
    "accuracy if classes are as frequent as in training; ECE with test samples weighted to equal classes and to the "
    "training prior, in brackets what right probabilities have by chance with so few test samples. Probe, HALO, LDA, "
    "neighbours and logit adjustment are scored at each prior with that target prior, the others have one set of "
    "logits. Intervals of differences are over draws; of frozen, over draws and test images. C of logistic regression "
    "is the best of six on a held-out fifth; cRT, HALO, MARC and LWS get that head."
)
SINGLE: dict[str, Callable[[], str]] = {
    "cost": cost,
    "imagenet-lt": partial(imagenet_size, "float32", mapped=False),
    "imagenet-lt-mapped": partial(imagenet_size, "float16", mapped=True),
}


def page() -> None:
    rows = [row for part in CASES for row in rows_of(part)]
    single = {name: json.loads(path.read_text()) for name in SINGLE if (path := KEPT / f"probe-{name}.json").is_file()}
    measured = [one for part in CASES for seed in range(100) for one in kept_scores(part, seed).values()]
    commits = ", ".join(sorted({one["commit"] for one in measured}))
    write_results("probe", "Probe on frozen features", rows, NOTES, **together(), **single, measured_at=commits)


def main() -> None:
    warnings.filterwarnings("ignore", "Only one sample available", UserWarning)  # LDA, classes of one sample
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*CASES, *SINGLE, "page"])
    parser.add_argument("--draws", type=int)
    parser.add_argument("--again", nargs="*", default=[], choices=METHODS)
    options = parser.parse_args()
    for part in options.parts:
        if part in CASES:
            for seed in range(options.draws or CASES[part][1]):
                measure(part, seed, options.again)
        elif part in SINGLE:
            keep(part, SINGLE[part]())
        else:
            page()


if __name__ == "__main__":
    main()
