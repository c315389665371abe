"""Calibrates saved logits of a model with several labels per sample (sigmoids), without the model.

OUT gets the files that other calibrations have (`tasks.calibration`). Scores are means over the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit

from longtail.data.tables import DELIMITERS
from longtail.files.atomic import replacing_folder, require_free, write_json
from longtail.files.records import FORMAT
from longtail.files.tensors import write_tensors
from longtail.files.text import parse_options, some_of
from longtail.methods import PostHocMethod
from longtail.metrics.scores import average_precision
from longtail.outputs.readers import LabelOutputs
from longtail.posthoc.gate import warn
from longtail.posthoc.multilabel import MultiLabelCalibration
from longtail.posthoc.priors import read_weights
from longtail.tasks.calibration import CALIBRATED, KIND, OWN_FILES, FittedOn, write_calibration, write_head

NAME = "multilabel"
METHOD = PostHocMethod(
    "Multi-label calibration",
    "confidence",
    "Platt, Probabilistic Outputs for Support Vector Machines, 1999",
    "multilabel.MultiLabelCalibration",
    trains="2K",
    needs="held-out samples",
)
SCORES = {
    "average_precision": "Mean average precision",
    "balanced": "Balanced accuracy",
    "macro_f1": "Macro F1",
    "nll": "NLL",
    "brier": "Brier",
}


def multilabel_method(options: dict[str, str], target: str | None, names: Sequence[str]) -> MultiLabelCalibration:
    """The method with options given as text; the target is a word, a number, or a CSV file with lines label,share."""
    given = options if target is None else {**options, "target_prevalence": target}
    (settings,) = parse_options(given, MultiLabelCalibration.__init__)
    wanted = settings.get("target_prevalence")
    if isinstance(wanted, str) and Path(wanted).suffix.lower() in DELIMITERS:
        settings["target_prevalence"] = read_weights(Path(wanted), names)
    method = MultiLabelCalibration(**settings)
    method.check_settings()
    return method


def calibrate_labels(
    fitted_on: LabelOutputs,
    method: MultiLabelCalibration,
    out: Path,
    held_out: dict[str, LabelOutputs],
    *,
    overwrite: bool = False,
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Fit the method, and write its numbers, the scores, the calibrated logits and the calibrated head if there is one.

    Returns the scores before and after of each held-out split.
    """
    require_free(out, OWN_FILES, KIND, overwrite=overwrite)
    method.fit(fitted_on.logits, fitted_on.labels)
    scores = {}
    with replacing_folder(out, OWN_FILES, KIND) as folder:
        for split, outputs in held_out.items():
            calibrated = np.asarray(method.transform(outputs.logits))
            before, after = (label_scores(logits, outputs.labels) for logits in (outputs.logits, calibrated))
            scores[split] = {"before": before, "after": after}
            tensors = {"logits": torch.from_numpy(calibrated), "labels": torch.from_numpy(outputs.labels)}
            write_tensors(folder / f"{split}{CALIBRATED}", tensors, {"format": FORMAT})
            write_json(folder / f"before-after-{split}.json", {"format": FORMAT, "split": split, **scores[split]})
            named = zip(outputs.names, outputs.labels.T, strict=True)
            if missing := [name for name, labels in named if not mixed(labels)]:
                reason = "has no positive or no negative sample; left out of the mean scores"
                warn(f"{split}: label {some_of(missing)} {reason}")
        write_head(folder, method, fitted_on)
        origin = FittedOn("validation", seen=False, views=0, samples=len(fitted_on.labels), model=None, digest=None)
        write_calibration(folder, method, METHOD, NAME, origin, None, fitted_on.names)
    return scores


def mixed(labels: np.ndarray) -> bool:
    """Whether a label (N,) has positives and negatives."""
    return bool(labels.any() and not labels.all())


def label_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    """Scores of logits (N, K) against labels (N, K); a decision is positive above a probability of one half.

    Average precision, balanced accuracy and F1 are means over the labels with positives and negatives; None without.
    """
    positive, alarm = labels.astype(bool), logits > 0
    chosen = np.array([mixed(of_label) for of_label in positive.T])
    hits, positives, alarms = ((positive & alarm).sum(0), positive.sum(0), alarm.sum(0))
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, fall_out = hits / positives, (alarms - hits) / (len(labels) - positives)
        per_label = {
            "average_precision": average_precision(logits, positive),
            "balanced": (recall + 1 - fall_out) / 2,
            "macro_f1": 2 * hits / (positives + alarms),
        }
    means = {name: float(values[chosen].mean()) if chosen.any() else None for name, values in per_label.items()}
    exact = logits.astype(np.float64)
    nll, brier = np.logaddexp(0, np.where(positive, -exact, exact)), (expit(exact) - positive) ** 2
    return {**means, "nll": float(nll.mean()), "brier": float(brier.mean())}
