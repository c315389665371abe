"""Fits `Probe` on a file of embeddings and writes the head, what was chosen, and the predictions of a test file."""

from __future__ import annotations

import csv
import io
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.errors import UserError
from longtail.files.atomic import replacing_folder, require_free, write_json, write_text
from longtail.files.progress import QUIET, Display
from longtail.files.provenance import provenance
from longtail.files.records import FORMAT
from longtail.files.tensors import write_tensors
from longtail.files.text import clock, table_cell
from longtail.metrics.scores import Metrics, evaluate
from longtail.outputs.embeddings import Embeddings
from longtail.posthoc.probe.estimator import Probe
from longtail.posthoc.probe.inputs import check_labels, log_target_prior

HEAD_FILE, RECORD_FILE, PREDICTIONS_FILE = "head.safetensors", "probe.json", "predictions.csv"
OWN_FILES = (HEAD_FILE, RECORD_FILE, PREDICTIONS_FILE)
KIND = "a fitted probe"
CHEAP = 10**8  # N * D * K up to which logistic regression is fitted beside the probe: seconds
ITERATIONS = 300  # of logistic regression
LONG = 20.0  # seconds; a fit that takes longer is announced
USUAL_PASSES = 300  # over the features; 280 to 580 were measured on small data
TIMED_ROWS = 1024
LOWEST = -700.0  # log-probability that a float64 still holds


@dataclass(frozen=True)
class ProbeScores:
    """What a fit gave.

    Args:
        probe: the fitted estimator.
        test: scores of the test samples, if they have labels.
        plain: their scores by logistic regression, if it was cheap to fit.
        left_out: why there are no scores of logistic regression.
    """

    probe: Probe
    test: Metrics | None
    plain: Metrics | None
    left_out: str

    def changes(self) -> list[tuple[str, int, float, float]]:
        """Class, its training samples, accuracy by logistic regression and by the probe; greatest gain first."""
        if self.test is None or self.plain is None:
            return []
        rows = zip(
            self.probe.classes_, self.probe.class_counts_, self.plain.per_class, self.test.per_class, strict=True
        )
        changed = [(str(name), int(n), a, b) for name, n, a, b in rows if a is not None and b is not None and a != b]
        return sorted(changed, key=lambda row: row[2] - row[3])


@dataclass(frozen=True)
class Samples:
    """Features (N, D) of some source, and class indices (N,) if they are known."""

    source: str
    features: np.ndarray
    labels: np.ndarray | None


def fit_probe(
    train: Embeddings,
    out: Path,
    *,
    test: Embeddings | None = None,
    target_prior: Any = "uniform",
    overwrite: bool = False,
    display: Display = QUIET,
) -> ProbeScores:
    """Fit on labelled embeddings; the folder appears whole, or not at all."""
    require_free(out, OWN_FILES, KIND, overwrite=overwrite)
    if train.labels is None:
        raise UserError(f"{train.path} has no labels (labels, y); put them into the file, or give --labels FILE")
    try:
        classes, labels = check_labels(train.labels, len(train.features), None)
    except UserError as error:
        raise UserError(f"{train.path}: {error}") from error
    counts = np.bincount(labels)
    log_target_prior(target_prior, np.log(counts / len(labels)), classes)  # refused before anything is computed
    truth = None if test is None else _test_labels(train, test, classes)
    fitted_on = Samples(str(train.path), train.features, labels)
    held_out = None if test is None else Samples(str(test.path), test.features, truth)
    announce(fitted_on, counts, display)
    probe = Probe(target_prior).fit(train.features, train.labels)
    scores = score_probe(probe, fitted_on, held_out)
    with replacing_folder(out, OWN_FILES, KIND) as folder:
        write_tensors(folder / HEAD_FILE, probe.to_linear().state_dict(), {"format": FORMAT, "head": "Linear"})
        write_json(folder / RECORD_FILE, record_of(scores, fitted_on, held_out))
        if test is not None:
            write_text(folder / PREDICTIONS_FILE, _predictions(probe, test))
    return scores


def announce(train: Samples, counts: np.ndarray, display: Display) -> None:
    """Print the size of the problem and, if it is large, how long it takes."""
    (size, width), number = train.features.shape, len(counts)
    display.line(
        f"{train.source}: {size:,} samples, {width:,} features, {number:,} classes of {counts.max():,} to "
        f"{counts.min():,} samples"
    )
    if (seconds := _estimate(train.features, number)) > LONG:
        display.line(f"fitting takes about {clock(seconds)} (a rough estimate)")


def _test_labels(train: Embeddings, test: Embeddings, classes: np.ndarray) -> np.ndarray | None:
    """Class indices (M,) of the test samples; numbers in one file may be text in the other."""
    if test.features.shape[1] != train.features.shape[1]:
        raise UserError(
            f"{test.path} has {test.features.shape[1]} features, {train.path} has {train.features.shape[1]}; both must "
            "come from the same backbone"
        )
    if test.labels is None:
        return None
    index = {str(name): code for code, name in enumerate(classes)}
    codes = np.array([index.get(str(label), -1) for label in test.labels])
    if (codes < 0).any():
        row = int(np.argmin(codes))
        raise UserError(f"{test.path}: row {row} is of class {test.labels[row]}, which {train.path} does not have")
    return codes


def _estimate(features: np.ndarray, classes: int) -> float:
    """Seconds of a fit: the usual number of passes, at the speed of a small one."""
    rows = torch.from_numpy(np.array(features[:TIMED_ROWS], dtype=np.float32))
    weight = torch.zeros(classes, rows.shape[1])
    began = time.perf_counter()
    (rows @ weight.T).softmax(1).T @ rows
    return (time.perf_counter() - began) * len(features) / len(rows) * USUAL_PASSES


def score_probe(probe: Probe, train: Samples, test: Samples | None) -> ProbeScores:
    """Scores of test samples, beside those of logistic regression if it is quick."""
    if test is None or test.labels is None:
        return ProbeScores(probe, None, None, "it is compared on test samples with labels (--test FILE)")
    assert train.labels is not None
    truth, counts = test.labels, probe.class_counts_
    scores = evaluate(np.log(probe.predict_proba(test.features).clip(1e-300)), truth, counts)
    size = train.features.size * len(counts)
    if size > CHEAP:
        return ProbeScores(probe, scores, None, f"N * D * K is {size:.1g}, and up to {CHEAP:.0g} it is quick")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        plain = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))
        plain.fit(train.features, train.labels)
        logits = np.full((len(truth), len(counts)), LOWEST)
        logits[:, plain.classes_] = plain.predict_log_proba(test.features).clip(LOWEST)
    return ProbeScores(probe, scores, evaluate(logits, truth, counts), "")


def record_of(scores: ProbeScores, train: Samples, test: Samples | None) -> dict[str, Any]:
    """The content of `probe.json`."""
    probe = scores.probe
    target = np.exp(probe.log_target_ - np.logaddexp.reduce(probe.log_target_))
    return {
        "format": FORMAT,
        "kind": "probe",
        "logits": "features @ weight.T + bias of the linear layer, right for the target frequencies",
        "classes": probe.classes_.tolist(),
        "class_counts": probe.class_counts_.tolist(),
        "target_prior": str(probe.target_prior),
        "target_frequencies": target.tolist(),
        "result": asdict(probe.result_),
        "train": {"source": train.source, "samples": len(train.features), "features": train.features.shape[1]},
        "test": None if test is None else {"source": test.source, "samples": len(test.features)},
        "scores": {name: value.to_dict() for name, value in named_scores(scores).items()},
        "provenance": provenance(),
    }


def named_scores(scores: ProbeScores) -> dict[str, Metrics]:
    """Scores of the test samples by method."""
    named = {"logistic regression": scores.plain, "Probe": scores.test}
    return {name: metrics for name, metrics in named.items() if metrics is not None}


def _predictions(probe: Probe, test: Embeddings) -> str:
    """CSV text: the row, its label if there is one, the predicted class and its probability."""
    shares = probe.predict_proba(test.features)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", *([] if test.labels is None else ["label"]), "prediction", "probability"])
    for row, best in enumerate(shares.argmax(1)):
        label = [] if test.labels is None else [table_cell(str(test.labels[row]))]
        writer.writerow([row, *label, table_cell(str(probe.classes_[best])), f"{shares[row, best]:.4f}"])
    return text.getvalue()
