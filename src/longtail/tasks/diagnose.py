"""Whether a classifier is biased by the long tail, and whether calibration would help; measured on held-out outputs.

The signs of bias: mean margins and logits fall with class size, and tail classes have lower accuracy than head
classes. The trial: methods are fitted as `calibrate` would fit them, and the gain in balanced accuracy of the one that
`calibrate` takes is given with its interval.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longtail.errors import UserError
from longtail.files.atomic import write_json
from longtail.files.records import FORMAT, as_record, read_json
from longtail.files.text import percent, some_of
from longtail.methods import POSTHOC_METHODS
from longtail.metrics.intervals import (
    Fallen,
    Interval,
    fallen_classes,
    images_to_settle,
    paired_difference,
    show_difference,
)
from longtail.metrics.margins import State, describe_state
from longtail.metrics.scores import Metrics, natural_accuracy
from longtail.outputs.record import Outputs
from longtail.posthoc.candidates import Candidate, Trial, try_candidates
from longtail.posthoc.inputs import from_outputs
from longtail.runs.folder import Run

FEW_SAMPLES = 5  # fewer held-out samples of a class are mentioned,
SAFE = "--most-loss 1"  # options of `calibrate` where held-out images are too few for a clear result
MENTIONED_POINTS = 1.0  # if a single one moves balanced accuracy by as many points
FALLING = 0.3  # rank correlation of class size and mean margin above which margins fall with class size


@dataclass(frozen=True)
class Tried:
    """One method on held-out samples.

    Args:
        method: its name; softmax is the unchanged model.
        log_likelihood: mean, at the target prior.
        gain: in balanced accuracy.
        natural: top-1 at the training prior, the price.
    """

    method: str
    log_likelihood: float
    gain: Interval
    natural: float


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Args:
        split: split of the held-out samples.
        samples: number of held-out samples.
        before: the unchanged model.
        tried: every candidate.
        method: name of the method that `calibrate` takes; softmax means the model stays unchanged.
        nearest: the method that `gain` belongs to: the chosen one or, if the model stays unchanged, the candidate
            with the highest likelihood.
        gain: balanced accuracy after minus before.
        tail_gain: the same over the half of the classes with fewer training images.
        fallen: classes whose accuracy falls by more than their interval.
        fitted: how the methods were fitted.
        rare: number of classes with the fewest held-out samples.
        fewest: how many samples each of them has.
        classes: number of classes with held-out samples.
        missing: names of the classes without any.
    """

    split: str
    samples: int
    before: State
    tried: list[Tried]
    method: str
    nearest: str
    gain: Interval
    tail_gain: Interval
    fallen: list[Fallen]
    fitted: str
    rare: int
    fewest: int
    classes: int
    missing: list[str]

    @property
    def helps(self) -> bool:
        """Whether a method is significantly better than the unchanged model, in likelihood and balanced accuracy."""
        return self.method != "softmax" and (self.gain.low or 0) > 0

    @property
    def advice(self) -> list[str] | None:
        """The options of `longtail calibrate` that the recommendation comes to; None if it would do harm."""
        if self.helps:
            return ["--method", self.method]
        return None if (self.gain.high or 0) < 0 else ["--method", self.nearest, *SAFE.split()]

    @property
    def biased(self) -> bool:
        """Whether margins fall with class size and a method helps significantly."""
        return self.helps and self.before.correlation["margins"] > FALLING

    def sentences(self) -> str:
        """The recommendation, in two sentences, and more if classes have very few or no held-out samples."""
        sentences = [self._recommendation()]
        best = max(self.tried, key=lambda one: one.gain.value)
        if self.helps and self.method == "halo" and best.gain.value > self.gain.value:
            sentences.append(
                f"{POSTHOC_METHODS[best.method].title} gained more in this trial (--method {best.method} takes it), "
                "but whoever chooses by such trials loses more on average than with HALO."
            )
        step = 100 / (self.fewest * self.classes)
        if self.fewest < FEW_SAMPLES and step >= MENTIONED_POINTS:
            classes = "1 class has" if self.rare == 1 else f"{self.rare:,} classes have"
            samples = "1 held-out sample" if self.fewest == 1 else f"{self.fewest} held-out samples"
            sentences.append(f"{classes} only {samples}: a single sample moves balanced accuracy by {step:.1f} points.")
        if self.missing:
            sentences.append(f"No held-out samples of class {some_of(self.missing)}: nothing was measured on them.")
        return " ".join(sentences)

    def _recommendation(self) -> str:
        margin = self.before.correlation["margins"]
        trend = "Margins fall with class size" if margin > FALLING else "Margins do not fall clearly with class size"
        first = f"{trend} (rank correlation {margin:+.2f})"
        if self.biased:
            first = f"This classifier is long-tail biased: its margins fall with class size ({margin:+.2f})"
        title = POSTHOC_METHODS[self.nearest].title
        points, _, interval = show_difference(self.gain).partition(" ")
        expected = f"{points} points of balanced accuracy {interval}".rstrip()
        if self.helps:
            after = next(one.natural for one in self.tried if one.method == self.nearest)
            price = f"top-1 at the training prior: {percent(self.tried[0].natural)} → {percent(after)}"
            return f"{first}. Calibrate with {title}, {self.fitted}: expect {expected} on images like these ({price})."
        if (self.gain.high or 0) < 0:
            return (
                f"{first}, and calibration would lower accuracy ({title}: {expected}). Keep the classifier unchanged."
            )
        enough = images_to_settle(self.gain, self.samples)
        settled = "too little to measure here" if enough is None else f"clear from about {enough:,} images on"
        return (
            f"{first}; {self.samples:,} {self.split} images leave open whether {title} helps: {expected}, {settled}. "
            f"Keep the classifier unchanged, or limit the price: calibrated with {SAFE}, it loses at most 1 point of "
            "top-1 at the training prior on these images."
        )

    def __str__(self) -> str:
        return self.sentences()

    def to_dict(self) -> dict[str, Any]:
        metrics: Metrics = self.before.metrics
        return {
            "split": self.split,
            "samples": self.samples,
            "rank_correlation": self.before.correlation,
            "balanced": metrics.balanced,
            "many": metrics.many,
            "medium": metrics.medium,
            "few": metrics.few,
            "biased": self.biased,
            "method": self.method,
            "gain_of": self.nearest,
            "gain": vars(self.gain),
            "natural": metrics.natural,
            "tail_gain": vars(self.tail_gain),
            "fallen": [vars(one) for one in self.fallen],
            "fitted": self.fitted,
            "missing": self.missing,
            "tried": [asdict(one) for one in self.tried],
            "recommendation": self.sentences(),
        }


def diagnose(held_out: Outputs, train: Outputs | None = None) -> Diagnosis:
    """Diagnose a model from held-out outputs; `class_counts` must be those of its training set."""
    if len(np.unique(held_out.class_counts)) == 1:
        raise UserError("all classes have the same number of training images: there is no long tail")
    # The tail is the half of the classes with fewer training images.
    order = np.argsort(-held_out.class_counts, kind="stable")
    tail = np.isin(held_out.labels, order[len(order) // 2 :])
    if not tail.any():
        raise UserError(
            f"the {held_out.split} outputs hold no sample of a tail class; use another split (--split test), or hold "
            "out images of every class (longtail train --validation 0.1)"
        )
    never = np.flatnonzero(held_out.weight_norms == 0)
    if len(never):
        raise UserError(
            f"the vector of class {held_out.names[never[0]]} in the head is zero: the class is never predicted (a "
            "target prior of 0?); diagnose the model before it was calibrated"
        )
    seen = None if train is None else from_outputs(train)
    trial = try_candidates(seen, from_outputs(held_out, need_every_class=False), "uniform")
    as_it_is, chosen = trial.candidates[0], trial.chosen
    nearest = chosen if chosen is not as_it_is else max(trial.candidates[1:], key=trial.mean)
    before = held_out.rows().read(slice(None)).numpy()
    _, sizes = np.unique(held_out.labels, return_counts=True)
    return Diagnosis(
        split=held_out.split,
        samples=len(held_out),
        before=describe_state("before", before, held_out),
        tried=[_tried(candidate, trial, held_out) for candidate in trial.candidates],
        method=chosen.name,
        nearest=nearest.name,
        gain=paired_difference(nearest.hits, as_it_is.hits, held_out.labels),
        tail_gain=paired_difference(nearest.hits[tail], as_it_is.hits[tail], held_out.labels[tail]),
        fallen=fallen_classes(as_it_is.hits, nearest.hits, held_out.labels, held_out.names),
        fitted=_fitted(nearest, train),
        rare=int((sizes == sizes.min()).sum()),
        fewest=int(sizes.min()),
        classes=len(sizes),
        missing=held_out.missing_classes,
    )


def _tried(candidate: Candidate, trial: Trial, held_out: Outputs) -> Tried:
    gain = paired_difference(candidate.hits, trial.candidates[0].hits, held_out.labels)
    natural = natural_accuracy(candidate.hits, held_out.labels, held_out.counts_for_groups)
    return Tried(candidate.name, trial.mean(candidate), gain, natural)


def _fitted(candidate: Candidate, train: Outputs | None) -> str:
    if candidate.method.needs_validation:
        return "fitted on held-out images"
    if not candidate.method.learns_from_seen:
        return "which needs the class counts alone"
    return "fitted on training images" if train is not None else "fitted on held-out images"


@dataclass(frozen=True)
class DiagnosisFile:
    """What readers need of `diagnosis-SPLIT.json`; the file holds all of `Diagnosis.to_dict`."""

    model: str
    split: str
    recommendation: str
    tried: list[Tried]
    samples: int = 0
    method: str = "softmax"
    """The method that it recommends."""


def write_diagnosis(run: Run, diagnosis: Diagnosis) -> Path:
    """Keep a diagnosis in the folder of its run, for the report."""
    values = {"format": FORMAT, "model": run.model_identity, **diagnosis.to_dict()}
    return write_json(run.folder / f"diagnosis-{diagnosis.split}.json", values)


def read_diagnosis(run: Run) -> DiagnosisFile | None:
    """The diagnosis in the folder of a run, on validation images if there is one; None if it is of other weights."""
    for split in ("validation", "test"):
        path = run.folder / f"diagnosis-{split}.json"
        values = read_json(path) if path.is_file() else {}
        if values.get("model") == run.model_identity:
            return as_record(DiagnosisFile, values, path)
    return None
