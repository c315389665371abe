"""Fits `Probe` on a file of embeddings, or on images with a frozen backbone.

Embeddings give a folder with the head, what was chosen, and the predictions of a test file. Images give a run: the
run of `longtail train --train head`, with its scores on test images.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.backbones import BACKBONES
from longtail.config import TrainConfig
from longtail.errors import UserError
from longtail.files.atomic import replacing_folder, require_free, write_json, write_text
from longtail.files.progress import LINE_SECONDS, QUIET, Display
from longtail.files.records import FORMAT, as_record, provenance, read_json
from longtail.files.tensors import write_tensors
from longtail.files.text import clock, csv_text
from longtail.metrics.scores import Metrics, evaluate
from longtail.outputs.readers import Embeddings
from longtail.posthoc.probe.choice import WORK_FOR_CHOICE
from longtail.posthoc.probe.estimator import Probe
from longtail.posthoc.probe.inputs import check_labels, log_target_prior
from longtail.posthoc.probe.result import ProbeResult
from longtail.runs.folder import Run
from longtail.runs.network import outputs_path
from longtail.runs.record import PROBE_FILE
from longtail.training.loop import train
from longtail.training.tuning import frozen_run, with_head_of

HEAD_FILE, PREDICTIONS_FILE = "head.safetensors", "predictions.csv"
OWN_FILES = (HEAD_FILE, PROBE_FILE, PREDICTIONS_FILE)
KIND = "a fitted probe"
CHEAP = 10**8  # N * D * K up to which logistic regression is fitted beside the probe: seconds
ITERATIONS = 300  # of logistic regression
LONG = 20.0  # seconds; a fit that takes longer is announced
USUAL_PASSES, FULL_PASSES = 300, 50  # over the features, and over all samples of large data
TIMED_ROWS = 1024
LOWEST = -700.0  # log-probability that a float64 still holds


@dataclass(frozen=True)
class ProbeScores:
    """What was chosen, and scores of test samples.

    Args:
        result: of the fit.
        test: scores of the test samples by method, if they have labels: logistic regression, if it was quick, and
            Probe.
        left_out: why there are no scores of logistic regression.
        changes: class, its training samples, accuracy by logistic regression and by Probe; greatest gain first.
    """

    result: ProbeResult
    test: dict[str, Metrics]
    left_out: str
    changes: list[tuple[str, int, float, float]]


def fit_probe(
    train: Embeddings,
    out: Path,
    *,
    test: Embeddings | None = None,
    target_prior: Any = "uniform",
    overwrite: bool = False,
    display: Display = QUIET,
) -> ProbeScores:
    """Fit on labelled embeddings; the folder is written atomically."""
    require_free(out, OWN_FILES, KIND, overwrite=overwrite)
    if train.labels is None:
        raise UserError(
            f"{train.path} has no labels called label, labels, y or target: name their column with --label-column, or "
            "give --labels FILE"
        )
    try:
        classes, labels = check_labels(train.labels, len(train.features), None)
    except UserError as error:
        raise UserError(f"{train.path}: {error}") from error
    counts = np.bincount(labels)
    log_target_prior(target_prior, np.log(counts / len(labels)), classes)  # refused before anything is computed
    truth = None if test is None else _test_labels(train, test, classes)
    fitted_on, held_out = replace(train, labels=labels), None if test is None else replace(test, labels=truth)
    (size, width), number = train.features.shape, len(counts)
    display.line(
        f"{train.path}: {size:,} samples, {width:,} features, {number:,} classes of {counts.max():,} to "
        f"{counts.min():,} samples"
    )
    if (seconds := _estimate(train.features, number)) > LONG:
        display.line(f"fitting takes about {clock(seconds)} (a rough estimate)")
    names, report = [str(name) for name in classes], _throttled(display)
    probe = Probe(target_prior).fit_codes(train.features, labels, classes, counts, names, report=report)
    shares = None if test is None else np.asarray(probe.predict_proba(test.features))
    logits = None if shares is None else np.log(shares.clip(1e-300))
    scores = score_probe(probe.result_, classes.tolist(), counts, fitted_on, held_out, logits)
    source = {"source": str(train.path), "samples": size, "features": width}
    with replacing_folder(out, OWN_FILES, KIND) as folder:
        write_tensors(folder / HEAD_FILE, probe.to_linear().state_dict(), {"format": FORMAT, "head": "Linear"})
        write_json(folder / PROBE_FILE, {**probe.to_dict(), "train": source, **_scored(scores, held_out)})
        if test is not None and shares is not None:
            write_text(folder / PREDICTIONS_FILE, _predictions(classes, shares, test))
    return scores


def probe_images(
    config: TrainConfig, out: Path, *, target_prior: str = "uniform", overwrite: bool = False, display: Display
) -> ProbeScores:
    """Train the head of a frozen, pretrained network, and score it on test images; `out` becomes a run folder.

    Args:
        config: images, backbone and its weights.
        out: folder of the run.
        target_prior: class frequencies to be right for, as in `Probe`.
        overwrite: replace a run in the folder.
        display: where progress is shown.
    """
    if config.weights is None and config.backbone in BACKBONES:
        raise UserError(f"--backbone {config.backbone} has random weights; give pretrained ones with --weights FILE")
    config = replace(config, train="head", options={"target_prior": target_prior})
    train(config, out, overwrite=overwrite, display=display)
    run = Run.open(out).using(workers=config.workers, display=display)
    frozen, split, logits = frozen_run(run.network, run), run.scored_split, None
    outputs = {name: frozen.outputs(name) for name in ("train", split) if name}
    samples = {
        name: Embeddings(Path(f"{run.data_name}, {name}"), np.asarray(one.features), one.labels)
        for name, one in outputs.items()
    }
    if split:
        stored = with_head_of(outputs[split], run.network, run.model_identity)
        path = outputs_path(run, split)
        path.parent.mkdir(exist_ok=True)
        stored.save(path)
        logits = stored.rows().read(slice(None)).numpy()
    record = read_json(run.folder / PROBE_FILE)
    result = as_record(ProbeResult, record["result"], run.folder / PROBE_FILE)
    held_out = samples.get(split or "")
    scores = score_probe(result, run.class_names, run.class_counts, samples["train"], held_out, logits)
    write_json(run.folder / PROBE_FILE, {**record, **_scored(scores, held_out)})
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


def _throttled(display: Display) -> Callable[[str], None]:
    """A function that prints a line unless the last one is only a few seconds old."""
    last = time.monotonic()

    def report(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            display.line(text)

    return report


def _estimate(features: np.ndarray, classes: int) -> float:
    """Seconds of a fit: the usual passes, of large data most of them over a subsample, at the speed of a small one."""
    rows = torch.from_numpy(np.array(features[:TIMED_ROWS], dtype=np.float32))
    weight = torch.zeros(classes, rows.shape[1])
    began = time.perf_counter()
    (rows @ weight.T).softmax(1).T @ rows
    of_choice = min(1.0, WORK_FOR_CHOICE / (features.size * classes)) * (USUAL_PASSES - FULL_PASSES)
    return (time.perf_counter() - began) * len(features) / len(rows) * (of_choice + FULL_PASSES)


def score_probe(
    result: ProbeResult,
    names: list[Any],
    counts: np.ndarray,
    train: Embeddings,
    test: Embeddings | None,
    logits: np.ndarray | None,
) -> ProbeScores:
    """Scores of the logits (M, K) of test samples, beside those of logistic regression if it is quick."""
    if test is None or test.labels is None or logits is None:
        return ProbeScores(result, {}, "it is compared on test samples with labels (--test FILE)", [])
    scores, truth = evaluate(logits, test.labels, counts), test.labels
    size = train.features.size * len(counts)
    if size > CHEAP:
        left_out = f"N * D * K is {size:.1g}, and up to {CHEAP:.0g} it is quick"
        return ProbeScores(result, {"Probe": scores}, left_out, [])
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))
        regression.fit(train.features, train.labels)
        logits = np.full((len(truth), len(counts)), LOWEST)
        logits[:, regression.classes_] = regression.predict_log_proba(test.features).clip(LOWEST)
    plain = evaluate(logits, truth, counts)
    rows = zip(names, counts, plain.per_class, scores.per_class, strict=True)
    changed = [(str(name), int(n), a, b) for name, n, a, b in rows if a is not None and b is not None and a != b]
    by_gain = sorted(changed, key=lambda row: row[2] - row[3])
    return ProbeScores(result, {"logistic regression": plain, "Probe": scores}, "", by_gain)


def _scored(scores: ProbeScores, test: Embeddings | None) -> dict[str, Any]:
    """The fields of `probe.json` about test samples."""
    return {
        "test": None if test is None else {"source": str(test.path), "samples": len(test.features)},
        "scores": {name: metrics.to_dict() for name, metrics in scores.test.items()},
        "provenance": provenance(),
    }


def _predictions(classes: np.ndarray, shares: np.ndarray, test: Embeddings) -> str:
    """CSV text: the row, its label if there is one, the predicted class and its probability."""
    best = shares.argmax(1)
    labels = [] if test.labels is None else [map(str, test.labels)]
    columns = zip(
        range(len(best)), *labels, map(str, classes[best]), (f"{value:.4f}" for value in shares.max(1)), strict=True
    )
    return csv_text(["row", *(["label"] if labels else []), "prediction", "probability"], columns)
