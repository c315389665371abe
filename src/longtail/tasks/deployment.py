"""A calibrated run in deployment: other class frequencies than it was calibrated for, and prediction sets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.errors import UserError
from longtail.files.records import as_record
from longtail.files.text import some_of
from longtail.posthoc.deployment import FEWEST_SAMPLES, SetScores
from longtail.posthoc.prior_estimate import PriorCheck, PriorEstimate, PriorEstimator
from longtail.posthoc.priors import check_target_prior, log_target
from longtail.runs.folder import Run
from longtail.runs.prediction import Predicted
from longtail.runs.record import CALIBRATION_FILE
from longtail.tasks.calibration import fitted_value, read_calibration

ESTIMATE = "estimate"
NAMED_CLASSES = 3


@dataclass(frozen=True)
class Deployment:
    """A calibrated run and what its calibration was fitted for.

    Args:
        run: the run.
        target: (K,) logarithm of the target prior of the calibration; None: it has none.
        prior_check: the trial of the estimate of class frequencies on held-out images, if there was one.
        set_scores: of held-out images, if there were enough.
    """

    run: Run
    target: np.ndarray | None
    prior_check: PriorCheck | None
    set_scores: SetScores | None

    @classmethod
    def of(cls, run: Run) -> Deployment:
        """Read the calibration of a run; a run that is not calibrated has nothing to offer."""
        numbers = read_calibration(run.folder, model=run.model_identity)[1] if run.calibration else {}
        path = run.folder / CALIBRATION_FILE
        target, check, scores = (
            fitted_value(numbers, f"{name}_") for name in ("log_target", "prior_check", "set_scores")
        )
        deployment = cls(
            run,
            None if target is None else _vector(target, path),
            None if check is None else as_record(PriorCheck, check, path),
            None if scores is None else as_record(SetScores, scores, path),
        )
        widths = {len(deployment.target) if deployment.target is not None else None}
        widths |= {len(deployment.set_scores.counts) if deployment.set_scores is not None else None}
        if not widths <= {None, len(run.class_names)}:
            raise UserError(f"{path} is damaged: it is about another number of classes than the run")
        return deployment

    @property
    def log_prior(self) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.run.class_counts / self.run.class_counts.sum()))

    def shift_to(self, target_prior: Any) -> np.ndarray:
        """(K,) what another target prior adds to the logits; -inf for a class of weight 0."""
        if self.target is None:
            raise UserError(f"--target-prior needs a model calibrated with halo, and {self.run.folder} is none")
        if not np.isfinite(self.target).all():
            raise UserError(
                f"{self.run.folder} was calibrated for a target prior with 0 for a class; calibrate it again"
            )
        check_target_prior(target_prior)
        return np.asarray(log_target(target_prior, self.log_prior, self.run.class_names) - self.target)

    def prior_estimator(self) -> PriorEstimator:
        """Estimates the class frequencies of new images from the probabilities of the run."""
        self.shift_to("uniform")  # the calibration has a target prior, of which no class is ruled out
        assert self.target is not None
        estimator = PriorEstimator(self.log_prior, self.target, self.prior_check)
        estimator.require_usable()
        return estimator

    def require_sets(self) -> SetScores:
        """The scores for prediction sets; raises if there are none."""
        if self.set_scores is None:
            raise UserError(
                f"prediction sets need a calibration with {FEWEST_SAMPLES} held-out images at least, and "
                f"{self.run.folder} has none; calibrate a run that was trained with --validation"
            )
        return self.set_scores

    def sets(self, probabilities: np.ndarray, coverage: float) -> np.ndarray:
        """(N, K) which classes belong to each image's set, from the probabilities of the run."""
        if self.target is not None:
            probabilities = moved(probabilities, -np.where(np.isfinite(self.target), self.target, 0.0))
        return self.require_sets().sets(probabilities, coverage)

    def shift_for(self, target_prior: Any, probabilities: np.ndarray) -> tuple[np.ndarray, PriorEstimate | None]:
        """(K,) what a target prior adds to the logits, and the estimate of it from the probabilities, if it is one."""
        if not isinstance(target_prior, str) or target_prior != ESTIMATE:
            return self.shift_to(target_prior), None
        estimate = self.prior_estimator().estimate(probabilities)
        return self.shift_to(estimate.power), estimate

    def require(self, target_prior: float | str | None, coverage: float | None) -> None:
        """Refuse what this run cannot do, before anything is predicted."""
        if coverage is not None:
            self.require_sets().thresholds(coverage)
        if target_prior == ESTIMATE:
            self.prior_estimator()
        elif target_prior is not None:
            self.shift_to(target_prior)

    def apply(
        self, predicted: Predicted, target_prior: float | str | None, coverage: float | None
    ) -> tuple[Predicted, dict[str, object], list[str]]:
        """Predictions at a target prior, with sets of a coverage; the estimate of the prior, and lines to print."""
        before, names = predicted.probabilities, predicted.class_names
        lines: list[str] = []
        estimate = None
        if coverage is not None:
            predicted = replace(predicted, sets=self.sets(before, coverage))
            lines.append(self.require_sets().promise(coverage))
        if target_prior is not None:
            shift, estimate = self.shift_for(target_prior, before)
            predicted = replace(predicted, probabilities=moved(before, shift))
        if estimate is not None:
            change = change_line(before.argmax(1), predicted.probabilities.argmax(1), names)
            lines += [*estimate_lines(estimate, names), change]
        return predicted, {} if estimate is None else {"target_prior": estimate_record(estimate)}, lines


def _vector(values: Any, path: Path) -> np.ndarray:
    """Numbers of a calibration, in which None means minus infinity."""
    if not isinstance(values, list) or not all(value is None or isinstance(value, int | float) for value in values):
        raise UserError(f"{path} is damaged: log_target_ is not a list of numbers")
    return np.array([-np.inf if value is None else float(value) for value in values])


def moved(probabilities: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Probabilities (N, K) after a shift (K,) of their logits."""
    weighted = probabilities * np.exp(shift - shift.max())
    return np.asarray(weighted / weighted.sum(1, keepdims=True))


def estimate_record(estimate: PriorEstimate) -> dict[str, Any]:
    """An estimate as plain values."""
    return {name: getattr(estimate, name) for name in ("power", "low", "high", "samples", "fits")}


def estimate_lines(estimate: PriorEstimate, class_names: list[str]) -> list[str]:
    """An estimate in words."""
    lines = [
        f"class frequencies estimated from {estimate.samples:,} images: the training prior to the power "
        f"{estimate.power:.2f} (95 % interval {estimate.low:.2f} to {estimate.high:.2f}; 1 is as in training, 0 is "
        "balanced)"
    ]
    if not estimate.fits:
        order = np.argsort(-estimate.surplus)
        more, fewer = ([class_names[c] for c in chosen[:NAMED_CLASSES]] for chosen in (order, order[::-1]))
        lines.append(
            f"the images do not look like any power of the training prior: more of {some_of(more)} and fewer of "
            f"{some_of(fewer)} than in the best one; if you know the frequencies, give them as a CSV file"
        )
    return lines


def change_line(before: np.ndarray, after: np.ndarray, class_names: list[str]) -> str:
    """How the predictions (N,) of two target priors differ, in words."""
    changed = int((before != after).sum())
    if not changed:
        return "no prediction changed"
    gains = np.bincount(after, minlength=len(class_names)) - np.bincount(before, minlength=len(class_names))
    largest = [c for c in np.argsort(-np.abs(gains), kind="stable")[:NAMED_CLASSES] if gains[c]]
    named = ", ".join(f"{class_names[c]} {gains[c]:+d}" for c in largest)
    return f"{changed:,} of {len(before):,} predictions changed{f': {named}' if named else ''}"
