"""A calibration that is applied only as far as its price allows.

Between the unchanged model and a calibration lie logits (1 - t) eta + t calibrated, with a strength t from 0 to 1. They
are linear in the features wherever the calibration is, so they fold into the same head. The strength is the largest one
up to which held-out samples respect the limits, or the one below it with the best score or the lowest cost. Methods
that use held-out samples in their fit are refitted in folds for that: each sample is scored by a fit without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import UserError, choose, number
from longtail.metrics.intervals import Interval, class_differences, paired_difference, show_difference
from longtail.metrics.scores import Metrics, evaluate_predictions
from longtail.metrics.table import SCORES
from longtail.posthoc.base import PostHoc
from longtail.posthoc.costs import cost_change, cost_text, mean_cost, prior_of_costs, read_costs
from longtail.posthoc.halo import HALO
from longtail.posthoc.held_out import FOLDS, HOW_TO_HOLD_OUT, out_of_fold_logits, stratified_folds
from longtail.posthoc.inputs import FitData
from longtail.posthoc.tempered import Wrapper

STRENGTHS = tuple(round(0.05 * step, 2) for step in range(21))


def interpolated(logits: Tensor, calibrated: Tensor, strength: float) -> Tensor:
    """Logits (N, K) between those of the model (strength 0) and the calibrated ones (strength 1)."""
    return torch.lerp(logits, calibrated.to(logits), strength)


@dataclass(frozen=True)
class OperatingPoint:
    """A strength and its scores on held-out samples; changes are those from the unchanged model."""

    strength: float
    metrics: Metrics
    balanced: Interval
    natural: Interval
    """Change of top-1 at the training prior."""
    kept: bool
    """Whether no class that is to be kept falls by more than its interval."""
    cost: float | None
    """Mean cost per image at the training prior, if there are costs."""
    saved: Interval | None
    """Change of that cost."""


class Limited(Wrapper):
    """A post-hoc method at the strength that limits its price.

    Args:
        method: the calibration.
        strength: a number from 0 (the unchanged model) to 1 (the calibration), or "auto" to choose it on held-out
            samples.
        most_loss: points of top-1 at the training prior that may be lost at most; None for no limit.
        keep: names of classes whose accuracy may not fall by more than its confidence interval.
        best: a score to maximise within the limits, "balanced" (accuracy) or "macro_f1"; None for the largest strength.
        costs: what mistakes cost, (K, K) with true classes in rows and predicted classes in columns, or a CSV file with
            their names. The strength with the lowest mean cost per image at the training prior is taken, within the
            limits; full strength of HALO, unless it has a target prior, is then that of the costs.

    Fitted attributes: `strength_`; with "auto", `natural_change_` (3,) the change of top-1 at the training prior on
    held-out samples with its interval, `balanced_change_` (3,), and with costs `cost_change_` (3,); `costs_`, the table
    of costs as lists; `result_` (of the method).

    >>> from longtail.posthoc import LogitAdjustment
    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat([0, 1], [900, 100])
    >>> logits = np.eye(2)[y] + rng.normal(size=(1000, 2)) + [2.2, 0.0]
    >>> limited = Limited(LogitAdjustment(), most_loss=5).fit(logits[::2], y[::2], validation=(logits[1::2], y[1::2]))
    >>> 0 < limited.strength_ < 1
    True
    """

    tuned: ClassVar[tuple[str, ...]] = ("strength",)
    adds = "limit"

    def __init__(
        self,
        method: PostHoc,
        *,
        strength: float | Literal["auto"] = "auto",
        most_loss: float | None = None,
        keep: Sequence[str] = (),
        best: Literal["balanced", "macro_f1"] | None = None,
        costs: Any = None,
    ) -> None:
        self.method = method
        self.strength = strength
        self.most_loss = most_loss
        self.keep = keep
        self.best = best
        self.costs = costs

    def check_settings(self) -> None:
        if not isinstance(self.method, PostHoc) or self.method.adds == self.adds or self.method.fitted_on_unseen:
            raise UserError("a strength belongs to a method that changes decisions, such as MARC or HALO")
        if self.strength != "auto":
            number("strength", self.strength, at_least=0, at_most=1)
            if self.most_loss is not None or self.keep or self.best is not None:
                raise UserError("a strength is either given, or chosen by most_loss, keep and best; give only one")
        elif self.best is not None and self.costs is not None:
            raise UserError("the strength is chosen either by best or by costs; give only one of them")
        if self.most_loss is not None:
            number("most_loss", self.most_loss, at_least=0, at_most=100)
        if self.best is not None:
            choose("score", self.best, ("balanced", "macro_f1"))
        self.method.check_settings()

    @property
    def needs_validation(self) -> bool:
        return self.method.needs_validation or self.chooses_a_setting

    @property
    def refuses_seen(self) -> bool:  # type: ignore[override]
        return self.method.refuses_seen or self.chooses_a_setting

    @property
    def chosen_(self) -> dict[str, float]:
        return {**self.method.chosen_, "strength": self.strength_}

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        kept = [data.class_names.index(choose("class", name, data.class_names)) for name in self.keep]
        costs = None if self.costs is None else read_costs(self.costs, data.class_names)
        self.costs_ = None if costs is None else costs.tolist()
        self.method.fit_checked(data, validation, judge=False)
        if costs is not None and isinstance(self.method, HALO) and str(self.method.target_prior) == "uniform":
            # Equal classes are right for one ratio of costs; dearer mistakes are beyond every strength.
            self.method = self.method.with_target_prior(prior_of_costs(costs, data.class_counts))
        self.result_ = self.method.result_
        if self.strength != "auto":
            self.strength_ = float(self.strength)
            return
        if validation is None:
            raise UserError(
                f"the strength is chosen on images that the network has not seen, but there are none: {HOW_TO_HOLD_OUT}"
            )
        points = self._points(data, validation, kept, costs)
        allowed = list(takewhile(self._allows, points))
        best = allowed[-1]
        if self.best is not None:
            best = max(allowed, key=lambda one: float(getattr(one.metrics, str(self.best))))
        elif costs is not None:
            best = min(allowed, key=lambda one: one.cost or 0.0)
        place = torch.tensor([float(points.index(best))])
        data.world.broadcast([place])  # rounding must not let processes choose differently
        self._point, self._full = points[int(place)], points[-1]
        self.strength_ = self._point.strength
        self.natural_change_, self.balanced_change_ = _bounds(self._point.natural), _bounds(self._point.balanced)
        self.cost_change_ = None if self._point.saved is None else _bounds(self._point.saved)

    def _points(
        self, data: FitData, held_out: FitData, kept: list[int], costs: np.ndarray | None
    ) -> list[OperatingPoint]:
        """Every strength, scored on held-out samples by fits that have not seen them."""
        labels, counts = held_out.labels.numpy(), data.class_counts
        for label in kept:
            if held_out.seen_counts[label] == 0:
                raise UserError(f"no held-out image of class {held_out.class_names[label]}: its loss is not measurable")
        logits = held_out.rows.read(slice(None))
        calibrated = out_of_fold_logits(self.method, data, held_out, stratified_folds(labels, FOLDS, seed=0))
        points, unchanged = [], logits.argmax(1).numpy()
        before = unchanged == labels
        for strength in STRENGTHS:
            predicted = interpolated(logits, calibrated, strength).argmax(1).numpy()
            hits = predicted == labels
            points.append(
                OperatingPoint(
                    strength=strength,
                    metrics=evaluate_predictions(predicted, labels, counts),
                    balanced=paired_difference(hits, before, labels),
                    natural=paired_difference(hits, before, labels, counts),
                    kept=bool((class_differences(hits, before, labels, len(counts)).high[kept] >= 0).all()),
                    cost=None if costs is None else mean_cost(costs, predicted, labels, counts),
                    saved=None if costs is None else cost_change(costs, predicted, unchanged, labels, counts),
                )
            )
        return points

    def _allows(self, point: OperatingPoint) -> bool:
        """Whether a point respects the limits; the unchanged model always does."""
        lost = -100 * point.natural.value
        return point.strength == 0 or ((self.most_loss is None or lost <= self.most_loss + 1e-9) and point.kept)

    def notes(self) -> list[str]:
        notes = super().notes()
        if self.strength != "auto":
            return notes
        point, score = self._point, SCORES[self.best or "balanced"]
        if self.strength_ == 0:
            why = "allow no strength above 0" if point.cost is None else "show no lower cost at any strength above 0"
            return [*notes, f"held-out images {why}: the model stays unchanged"]
        values = [score.show(getattr(one.metrics, score.name)) for one in (point, self._full)]
        notes.append(
            f"strength {point.strength:g} of 1, chosen on held-out images: top-1 at the training prior "
            f"{show_difference(point.natural)}, balanced accuracy {show_difference(point.balanced)}; "
            f"{score.heading} {values[0]}, at full strength {values[1]}"
        )
        if point.cost is not None and point.saved is not None:
            notes.append(
                f"held-out images: {cost_text(point.cost, point.saved)}; at full strength {self._full.cost:.3g}"
            )
            if self.strength_ == 1:
                notes.append(
                    "full strength costs least; where mistakes cost far more, --method halo --target-prior FILE goes "
                    "further: weigh each class by its training images times the cost of missing it"
                )
        return notes

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        return interpolated(logits, self.method.transform(logits, features), self.strength_)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        folded, offset = self.method.fold(weight, bias)
        own = torch.zeros_like(offset) if bias is None else bias
        return interpolated(weight, folded, self.strength_), interpolated(own, offset, self.strength_)


def _bounds(change: Interval) -> np.ndarray:
    """Value and bounds (3,)."""
    return np.array([change.value, change.low, change.high])
