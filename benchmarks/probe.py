"""Probe beside the heads that people fit on frozen features, on the same features.

Parts, all of them rows of docs/results/probe.md:

    digits    long-tailed digits (scikit-learn), pixels as features; every draw has other training and test images
    text      names of countries and languages (Babel), 100+ languages to tell apart: TF-IDF of letters, 256 components
    frozen    CIFAR-100-LT 100 at 96 px through a pretrained EfficientNet-Lite0 (see halo.py for what it needs)

    python benchmarks/probe.py digits text frozen

Rows of a part are kept in LONGTAIL_FEATURES (default: benchmarks/.data) and put on the page by the next run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import write_results
from halo_cases import KEPT, frozen_features
from scipy.special import log_softmax
from sklearn.datasets import load_digits
from sklearn.decomposition import TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from longtail import HALO, MARC, Outputs, Probe
from longtail.metrics.intervals import Interval, over_seeds, paired_difference
from longtail.posthoc import CRT, LWS

Draw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training features and labels, test features and labels
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
BINS = 15


def cut(labels: np.ndarray, most: int, fewest: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of a long tail: from `most` samples of a random class to `fewest` of another."""
    classes = rng.permutation(labels.max() + 1)
    sizes = np.geomspace(most, fewest, len(classes)).round().astype(int)
    chosen = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, sizes, strict=True)]
    return np.sort(np.concatenate(chosen))


def digits(draws: int) -> Iterator[Draw]:
    images, labels = load_digits(return_X_y=True)
    for seed in range(draws):
        rows = cut(labels, 120, 3, np.random.default_rng(seed))
        test = np.setdiff1d(np.arange(len(labels)), rows)
        yield images[rows] / 16, labels[rows], images[test] / 16, labels[test]


def names() -> tuple[list[str], np.ndarray]:
    """Names of countries and languages, each in one language only, and the number of that language."""
    from babel import Locale, localedata

    pairs = []
    for code in sorted(code for code in localedata.locale_identifiers() if "_" not in code):
        locale = Locale(code)
        words = {word for word in (*locale.territories.values(), *locale.languages.values()) if word and len(word) > 2}
        pairs += [(word, code) for word in sorted(words)]
    times = Counter(word for word, _ in pairs)
    single = [(word, code) for word, code in pairs if times[word] == 1]
    sizes = Counter(code for _, code in single)
    kept = [(word, code) for word, code in single if sizes[code] >= 200]
    return [word for word, _ in kept], np.unique([code for _, code in kept], return_inverse=True)[1]


def text(draws: int) -> Iterator[Draw]:
    words, labels = names()
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        rows = cut(labels, 150, 2, rng)
        rest = rng.permutation(np.setdiff1d(np.arange(len(labels)), rows))
        test = np.concatenate([rest[labels[rest] == c][:50] for c in range(labels.max() + 1)])
        letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 3), min_df=2, sublinear_tf=True)
        components = TruncatedSVD(256, random_state=0)
        train = components.fit_transform(letters.fit_transform([words[row] for row in rows]))
        yield train, labels[rows], components.transform(letters.transform([words[row] for row in test])), labels[test]


def frozen(draws: int) -> Iterator[Draw]:
    test, test_labels = frozen_features("test", 0)
    for seed in range(draws):
        yield *frozen_features("train", seed), test, test_labels


def logistic(features: np.ndarray, labels: np.ndarray, **settings: Any) -> LogisticRegression:
    """Logistic regression whose C is the best of five on a held-out fifth."""
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


def fits(draw: Draw) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Name of each method, and what fits it and gives logits (N, K) of the test samples."""
    features, labels, test, _ = draw
    centre, size = features.mean(0), features.std()
    near, near_test = ((part - centre) / size for part in (features, test))
    counts = np.bincount(labels)
    prior = np.log(counts / counts.sum())
    kept: dict[str, Any] = {}

    def probe() -> np.ndarray:
        kept["probe"] = Probe().fit(features, labels)
        return kept["probe"].decision_function(test)

    def plain() -> np.ndarray:
        kept["plain"] = logistic(near, labels)
        return kept["plain"].decision_function(near_test)

    def outputs(part: np.ndarray, own: np.ndarray, split: str) -> Outputs:
        head = {name: getattr(kept["plain"], source).astype(np.float32) for name, source in HEAD.items()}
        inputs = part.astype(np.float32)
        logits = inputs @ head["head_weight"].T + head["head_bias"]
        return Outputs(own, counts, logits=logits, features=inputs, split=split, **head)

    def after(method: Any) -> Callable[[], np.ndarray]:
        def fit() -> np.ndarray:
            method.fit(outputs(near, labels, "train"))
            return np.asarray(method.transform(outputs(near_test, draw[3], "test")))

        return fit

    equal = np.full(len(counts), 1 / len(counts))
    yield "Probe", probe
    yield "Probe, target prior of training", lambda: kept["probe"].with_target_prior("train").decision_function(test)
    yield "Logistic regression", plain
    yield "Logistic regression + logit adjustment", lambda: kept["plain"].decision_function(near_test) - prior
    yield (
        "Logistic regression, balanced",
        lambda: logistic(near, labels, class_weight="balanced").decision_function(near_test),
    )
    yield (
        "LDA, shrunk, equal priors",
        lambda: (
            LinearDiscriminantAnalysis("lsqr", shrinkage="auto", priors=equal)
            .fit(near, labels)
            .decision_function(near_test)
        ),
    )
    yield "10 nearest neighbours", lambda: _neighbours(near, labels, near_test)
    yield "cRT", after(CRT())
    yield "MARC on logistic regression", after(MARC())
    yield "LWS on logistic regression", after(LWS())
    yield "HALO, cross-fitted", after(HALO(held_out="cross-fit"))


HEAD = {"head_weight": "coef_", "head_bias": "intercept_"}


def _neighbours(features: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Votes of neighbours, divided by the training prior."""
    votes = KNeighborsClassifier(10, weights="distance").fit(features, labels).predict_proba(test)
    counts = np.bincount(labels)
    return np.log(np.clip(votes, 1e-6, None)) - np.log(counts / counts.sum())


def calibration_error(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    shares = np.exp(log_softmax(logits.astype(np.float64), axis=1))
    confidence, correct = shares.max(1), shares.argmax(1) == labels
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return 100 * float(np.abs(np.bincount(bins, weights * (confidence - correct), BINS)).sum())


def table(part: str, draws: list[Draw], same_test: bool) -> list[dict[str, Any]]:
    """Mean scores of every method over draws, and the difference of Probe's balanced accuracy from each."""
    scores: dict[str, list[list[float]]] = {}
    hits: dict[str, list[np.ndarray]] = {}
    for number, draw in enumerate(draws):
        labels, counts = draw[3], np.bincount(draw[1])
        balanced = 1 / np.bincount(labels)[labels] / len(counts)
        natural = (counts / counts.sum())[labels] * balanced * len(counts)
        for name, fit in fits(draw):
            began = time.process_time()
            logits = fit()
            seconds = time.process_time() - began
            hit = logits.argmax(1) == labels
            errors = [calibration_error(logits, labels, weights) for weights in (balanced, natural)]
            row = [100 * float(balanced @ hit), errors[0], 100 * float(natural @ hit), errors[1], seconds]
            scores.setdefault(name, []).append(row)
            hits.setdefault(name, []).append(hit)
            print(f"{part} {number} {name}: " + " ".join(f"{value:.2f}" for value in row), file=sys.stderr, flush=True)
    rows = []
    for name, values in scores.items():
        if same_test:
            gain = paired_difference(np.stack(hits["Probe"]), np.stack(hits[name]), draws[0][3])
            gain = Interval(*(None if v is None else 100 * v for v in (gain.value, gain.low, gain.high)))  # type: ignore[arg-type]
        else:
            gain = over_seeds([ours[0] - own[0] for ours, own in zip(scores["Probe"], values, strict=True)])
        columns = ("balanced", "ECE, equal classes", "natural", "ECE, training prior", "processor s")
        mean = {column: f"{value:.1f}" for column, value in zip(columns, np.mean(values, 0), strict=True)}
        bounds = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
        rows.append({"features": f"{part}, {len(draws)} draws", "method": name, **mean})
        rows[-1]["Probe minus it, balanced"] = f"{gain.value:+.2f}{bounds}"
    return rows


def main() -> None:
    parts = {"digits": (digits, 10, False), "text": (text, 3, False), "frozen": (frozen, 3, True)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--draws", type=int)
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        source, usual, same_test = parts[part]
        rows = table(part, list(source(options.draws or usual)), same_test)
        (KEPT / f"probe-{part}.json").write_text(json.dumps(rows))
    kept = [json.loads(path.read_text()) for part in parts if (path := KEPT / f"probe-{part}.json").is_file()]
    notes = (
        "Linear heads on the same features, all on one thread. Per cent. *balanced*: mean accuracy of classes; "
        "*natural*: accuracy if classes are as frequent as in training; ECE with test samples weighted to equal "
        "classes and to the training prior. Intervals of differences are over draws; of frozen features, over draws "
        "and test images (from fewer than three draws, over test images alone). C of logistic regression is the "
        "best of five on a held-out fifth. MARC, LWS and HALO start from that head."
    )
    write_results("probe", "Probe on frozen features", [row for rows in kept for row in rows], notes)


if __name__ == "__main__":
    main()
