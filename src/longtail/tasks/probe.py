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
from longtail.files.atomic import replacing_folder, require_own, write_json, write_text
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
    require_own(out, OWN_FILES, KIND)
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} exists already; choose another --out or replace it with --overwrite")
    if train.labels is None:
        raise UserError(f"{train.path} has no labels (labels, y); put them into the file, or give --labels FILE")
    try:
        classes, labels = check_labels(train.labels, len(train.features), None)
    except UserError as error:
        raise UserError(f"{train.path}: {error}") from error
    counts = np.bincount(labels)
    target = log_target_prior(target_prior, np.log(counts / len(labels)), classes)
    truth = None if test is None else _test_labels(train, test, classes)
    (size, width), number = train.features.shape, len(classes)
    display.line(
        f"{train.path}: {size:,} samples, {width:,} features, {number:,} classes of {counts.max():,} to "
        f"{counts.min():,} samples"
    )
    if (seconds := _estimate(train.features, number)) > LONG:
        display.line(f"fitting takes about {clock(seconds)} (a rough estimate)")
    probe = Probe(target_prior).fit(train.features, train.labels)
    scores = _score(probe, train, test, truth)
    frequencies = np.exp(target - np.logaddexp.reduce(target))
    with replacing_folder(out, OWN_FILES, KIND) as folder:
        write_tensors(folder / HEAD_FILE, probe.to_linear().state_dict(), {"format": FORMAT, "head": "Linear"})
        write_json(folder / RECORD_FILE, _record(scores, train, test, str(target_prior), frequencies))
        if test is not None:
            write_text(folder / PREDICTIONS_FILE, _predictions(probe, test))
    return scores


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


def _score(probe: Probe, train: Embeddings, test: Embeddings | None, truth: np.ndarray | None) -> ProbeScores:
    if test is None or truth is None:
        return ProbeScores(probe, None, None, "it is compared on test samples with labels (--test FILE)")
    scores = evaluate(np.log(probe.predict_proba(test.features).clip(1e-300)), truth, probe.class_counts_)
    size = train.features.size * len(probe.classes_)
    if size > CHEAP:
        return ProbeScores(probe, scores, None, f"N * D * K is {size:.1g}, and up to {CHEAP:.0g} it is quick")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        plain = LogisticRegression(max_iter=ITERATIONS).fit(train.features, train.labels)
        logits = plain.predict_log_proba(test.features)
    return ProbeScores(probe, scores, evaluate(np.maximum(logits, -700.0), truth, probe.class_counts_), "")


def _record(
    scores: ProbeScores, train: Embeddings, test: Embeddings | None, target_prior: str, frequencies: np.ndarray
) -> dict[str, Any]:
    probe = scores.probe
    return {
        "format": FORMAT,
        "kind": "probe",
        "logits": f"features @ weight.T + bias of {HEAD_FILE}, right for the target frequencies",
        "classes": probe.classes_.tolist(),
        "class_counts": probe.class_counts_.tolist(),
        "target_prior": target_prior,
        "target_frequencies": frequencies.tolist(),
        "result": asdict(probe.result_),
        "train": {"file": str(train.path), "samples": len(train.features), "features": train.features.shape[1]},
        "test": None if test is None else {"file": str(test.path), "samples": len(test.features)},
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
