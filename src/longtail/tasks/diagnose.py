"""Is this classifier long-tail biased, and would calibration help? Answered on held-out outputs.

The signs: mean margins and logits that fall with class size, tail classes recognised worse than
head classes. The test: the gain of balanced accuracy by MARC, with its interval. If training
outputs are at hand MARC is fitted on them; if not, on parts of the held-out outputs, each sample
scored by a fit that has not seen it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail.errors import UserError
from longtail.metrics.intervals import Interval, paired_difference
from longtail.metrics.scores import Metrics
from longtail.metrics.state import State, describe_state
from longtail.outputs.record import Outputs
from longtail.posthoc.marc import MARC

FOLDS = 5


@dataclass(frozen=True)
class Diagnosis:
    """What was found; `gain` is balanced accuracy after minus before."""

    split: str
    samples: int
    before: State
    gain: Interval
    tail_gain: Interval
    cross_fitted: bool

    @property
    def biased(self) -> bool:
        """Whether margins fall with class size and repairing them surely helps."""
        return self.before.correlation["margins"] > 0.3 and self.gain.excludes_zero and self.gain.value > 0

    def sentences(self) -> str:
        """The recommendation, in two sentences."""
        margin = self.before.correlation["margins"]
        low, high = (100 * (bound or 0) for bound in (self.gain.low, self.gain.high))
        expected = f"{100 * self.gain.value:+.1f} points of balanced accuracy [{low:+.1f}, {high:+.1f}]"
        if self.biased:
            return (
                f"This classifier is long-tail biased: its margins fall with class size "
                f"(rank correlation {margin:+.2f}). Calibrate it: expect {expected} on images like these."
            )
        if self.gain.excludes_zero and self.gain.value > 0:
            return (
                f"Margins do not fall clearly with class size (rank correlation {margin:+.2f}), yet classes are "
                f"treated unequally. Calibration helps all the same: expect {expected}."
            )
        sign = "Margins fall with class size" if margin > 0.3 else "Margins do not fall clearly with class size"
        return (
            f"{sign} (rank correlation {margin:+.2f}), but calibration shows no sure gain: {expected}. "
            "Leave the classifier as it is, or bring more held-out images to be sure."
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
            "gain": vars(self.gain),
            "tail_gain": vars(self.tail_gain),
            "cross_fitted": self.cross_fitted,
            "biased": self.biased,
            "recommendation": self.sentences(),
        }


def diagnose(held_out: Outputs, train: Outputs | None = None) -> Diagnosis:
    """Diagnose a model from held-out outputs; `class_counts` must be those of its training set."""
    if len(np.unique(held_out.class_counts)) == 1:
        raise UserError("all classes have the same number of training images: there is no long tail to diagnose")
    before = held_out.rows().read(slice(None)).numpy()
    after = cross_fitted(held_out) if train is None else np.asarray(MARC().fit(train).transform(held_out))
    hits = [logits.argmax(1) == held_out.labels for logits in (after, before)]
    # The tail is the half of the classes with fewer training images.
    order = np.argsort(-held_out.class_counts, kind="stable")
    tail = np.isin(held_out.labels, order[len(order) // 2 :])
    if not tail.any():
        raise UserError(f"the {held_out.split} outputs hold no sample of a tail class")
    return Diagnosis(
        split=held_out.split,
        samples=len(held_out),
        before=describe_state("before", before, held_out),
        gain=paired_difference(hits[0], hits[1], held_out.labels),
        tail_gain=paired_difference(hits[0][tail], hits[1][tail], held_out.labels[tail]),
        cross_fitted=train is None,
    )


def cross_fitted(outputs: Outputs, *, seed: int = 0) -> np.ndarray:
    """Repaired logits (N, K): each fold's by a MARC fitted on the other folds."""
    per_class = np.bincount(outputs.labels, minlength=outputs.num_classes)
    folds = min(FOLDS, int(per_class.min()))
    if folds < 2:
        scarce = int(np.argmin(per_class))
        raise UserError(
            f"class {scarce} has {per_class[scarce]} held-out samples; at least 2 of every class are needed to try "
            "calibration on parts of them, or training outputs (--train)"
        )
    rng = np.random.default_rng(seed)
    fold = np.empty(len(outputs), dtype=int)
    for label in range(outputs.num_classes):
        own = rng.permutation(np.flatnonzero(outputs.labels == label))
        fold[own] = np.arange(len(own)) % folds
    logits = outputs.rows().read(slice(None)).numpy()
    repaired = np.empty_like(logits)
    known = {"weight_norms": outputs.weight_norms}
    for number in range(folds):
        held, kept = fold == number, fold != number
        # Weights even out the classes among the samples at hand, as on the training set.
        method = MARC().fit(logits[kept], outputs.labels[kept], class_counts=per_class, **known)
        repaired[held] = method.transform(logits[held])
    return repaired
