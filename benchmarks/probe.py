"""Probe beside the heads that people fit on frozen features, on the same features.

Parts, all of them rows of docs/results/probe.md:

    digits    long-tailed digits (scikit-learn), pixels as features; every draw has other training and test images
    text      names of countries and languages (Babel), 100+ languages to tell apart: TF-IDF of letters, 256 components
    regions   names of regions (pycountry), of which country they are: a natural tail; TF-IDF of letters, 128 components
    frozen    CIFAR-100-LT 100 at 96 px through a pretrained EfficientNet-Lite0 (see halo.py for what it needs)
    coverage  long-tailed digits again: does the interval of the estimate hold the accuracy on test images?
    page      nothing is measured: writes the page from what is kept
    cost      drawn features of 20,000 samples, 1,280 features, 200 classes: seconds beside logistic regression

    python benchmarks/probe.py digits text regions frozen coverage

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
from halo_cases import KEPT, frozen_features, linear_head
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
        yield letters_of(words, labels, rows, test, 256)


def letters_of(words: list[str], labels: np.ndarray, rows: np.ndarray, test: np.ndarray, width: int) -> Draw:
    """TF-IDF of letters, fitted on the training words, in so many components."""
    letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 3), min_df=2, sublinear_tf=True)
    components = TruncatedSVD(width, random_state=0)
    train = components.fit_transform(letters.fit_transform([words[row] for row in rows]))
    return train, labels[rows], components.transform(letters.transform([words[row] for row in test])), labels[test]


def regions(draws: int) -> Iterator[Draw]:
    """A third of the regions of every country with four of them is held out."""
    import pycountry

    sizes = Counter(region.country_code for region in pycountry.subdivisions)
    kept = [(region.name, region.country_code) for region in pycountry.subdivisions if sizes[region.country_code] > 3]
    labels = np.unique([code for _, code in kept], return_inverse=True)[1]
    for seed in range(draws):
        order = np.random.default_rng(seed).permutation(len(labels))
        own = [order[labels[order] == c] for c in range(labels.max() + 1)]
        test = np.concatenate([rows[: len(rows) // 3] for rows in own])
        rows = np.concatenate([rows[len(rows) // 3 :] for rows in own])
        yield letters_of([name for name, _ in kept], labels, rows, test, 128)


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


def fits(draw: Draw, seed: int, large: bool) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Name of each method, and what fits it and gives logits (N, K) of the test samples.

    Of large data, methods that need a head get one of 500 steps of Adam, and logistic regression is left out.
    """
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
        found = linear_head(500, seed) if large else [getattr(kept["plain"], name) for name in ("coef_", "intercept_")]
        head = {
            name: values.astype(np.float32) for name, values in zip(("head_weight", "head_bias"), found, strict=True)
        }
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
    if not large:
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
    yield "HALO, cross-fitted", after(HALO(held_out="cross-fit"))
    yield "MARC", after(MARC())
    yield "LWS", after(LWS())


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


def _keep(part: str, found: Any) -> None:
    (KEPT / f"probe-{part}.json").write_text(json.dumps(found))


def table(part: str, draws: Iterator[Draw], same_test: bool, large: bool) -> None:
    """Keep mean scores of every method over draws, and the difference of Probe's balanced accuracy from each."""
    scores: dict[str, list[list[float]]] = {}
    hits: dict[str, list[np.ndarray]] = {}
    for number, draw in enumerate(draws):
        labels, counts = draw[3], np.bincount(draw[1])
        balanced = 1 / np.bincount(labels)[labels] / len(counts)
        natural = (counts / counts.sum())[labels] * balanced * len(counts)
        for name, fit in fits(draw, number, large):
            began = time.process_time()
            logits = fit()
            seconds = time.process_time() - began
            hit = logits.argmax(1) == labels
            errors = [calibration_error(logits, labels, weights) for weights in (balanced, natural)]
            row = [100 * float(balanced @ hit), errors[0], 100 * float(natural @ hit), errors[1], seconds]
            scores.setdefault(name, []).append(row)
            hits.setdefault(name, []).append(hit)
            print(f"{part} {number} {name}: " + " ".join(f"{value:.2f}" for value in row), file=sys.stderr, flush=True)
            done = [one for one in scores if len(scores[one]) == number + 1]
            if number == 0 or len(done) == len(scores):  # rows of the draws that every method has
                _keep(
                    part, [_row(f"{part}, draws: {number + 1}", one, scores, hits, labels, same_test) for one in done]
                )


def _row(
    title: str,
    name: str,
    scores: dict[str, list[list[float]]],
    hits: dict[str, list[np.ndarray]],
    labels: np.ndarray,
    same_test: bool,
) -> dict[str, Any]:
    values = scores[name]
    if same_test:
        gain = paired_difference(np.stack(hits["Probe"]), np.stack(hits[name]), labels)
        gain = Interval(*(None if v is None else 100 * v for v in (gain.value, gain.low, gain.high)))  # type: ignore[arg-type]
    else:
        gain = over_seeds([ours[0] - own[0] for ours, own in zip(scores["Probe"], values, strict=True)])
    columns = ("balanced", "ECE, equal classes", "natural", "ECE, training prior", "processor s")
    mean = {column: f"{value:.1f}" for column, value in zip(columns, np.mean(values, 0), strict=True)}
    bounds = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
    return {"features": title, "method": name, **mean, "Probe minus it, balanced": f"{gain.value:+.2f}{bounds}"}


def coverage(draws: int) -> str:
    """How often the intervals of the estimates hold the accuracy on test images, in words."""
    held = {"natural": 0, "balanced": 0}
    for features, labels, test, truth in digits(draws):
        counts, probe = np.bincount(labels), Probe().fit(features, labels)
        for name, prior, weights in (("natural", "train", counts), ("balanced", "uniform", np.ones(len(counts)))):
            hit = probe.with_target_prior(prior).predict(test) == truth
            of_sample = (weights / weights.sum() / np.bincount(truth))[truth]
            expected = getattr(probe.result_, name)
            held[name] += expected.low <= float(of_sample @ hit) <= expected.high
    return (
        f"over {draws} draws of long-tailed digits, the 95 % interval of the out-of-fold estimate holds the accuracy "
        f"on test images in {held['natural']} at the training prior, and in {held['balanced']} at equal classes"
    )


def cost(fits_of_logistic: int) -> str:
    """Processor seconds at 20,000 x 1,280 with 200 classes; logistic regression is measured for some fits."""
    rng = np.random.default_rng(0)
    sizes = np.geomspace(100, 1, 200)
    counts = np.maximum((sizes / sizes.sum() * 20_000).round(), 1).astype(int)
    labels = np.repeat(np.arange(200), counts)
    features = (0.2 * rng.normal(size=(200, 1280))[labels] + rng.normal(size=(len(labels), 1280))).astype(np.float32)
    began = time.process_time()
    probe = Probe().fit(features, labels)
    ours, began = time.process_time() - began, time.process_time()
    for strength in STRENGTHS[:fits_of_logistic]:
        LogisticRegression(C=strength, max_iter=300, tol=1e-3).fit(features[::5], labels[::5])
    theirs = (time.process_time() - began) / max(fits_of_logistic, 1) * 5
    return (
        f"{len(labels):,} x 1,280, 200 classes, one thread: Probe {ours:.0f} processor seconds "
        f"({probe.result_.passes} passes); one LogisticRegression about {theirs:.0f} (five times the mean of "
        f"{fits_of_logistic} fits on a fifth of the samples), so a search over 6 values in 5 folds about "
        f"{25 * theirs:.0f}"
    )


def main() -> None:
    parts = {
        "digits": (digits, 30, False, False),
        "text": (text, 3, False, False),
        "regions": (regions, 3, False, False),
        "frozen": (frozen, 3, True, True),
    }
    lines = {"coverage": (coverage, 60), "cost": (cost, 2)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*parts, *lines, "page"])
    parser.add_argument("--draws", type=int)
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    for part in (part for part in options.parts if part != "page"):
        if part in lines:
            measure, usual = lines[part]
            _keep(part, measure(options.draws or usual))
        else:
            source, usual, same_test, large = parts[part]
            table(part, source(options.draws or usual), same_test, large)
    known = {
        part: json.loads(path.read_text())
        for part in (*parts, *lines)
        if (path := KEPT / f"probe-{part}.json").is_file()
    }
    rows = [row for part in parts for row in known.get(part, [])]
    said = {part: known[part] for part in lines if part in known}
    notes = (
        "Linear heads on the same features, all on one thread. Per cent. *balanced*: mean accuracy of classes; "
        "*natural*: accuracy if classes are as frequent as in training; ECE with test samples weighted to equal "
        "classes and to the training prior. Intervals of differences are over draws; of frozen features, over draws "
        "and test images (from fewer than three draws, over test images alone). C of logistic regression is the "
        "best of five on a held-out fifth. cRT, HALO, MARC and LWS get that head; on the frozen features, where "
        "logistic regression was not measured, one of 500 steps of Adam."
    )
    write_results("probe", "Probe on frozen features", rows, notes, **said)


if __name__ == "__main__":
    main()
