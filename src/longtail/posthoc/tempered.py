"""Confidence after a calibration: one temperature on top, fitted on held-out samples.

Calibrated logits are right for a target prior, held-out samples may be distributed differently. The
temperature is fitted half-way, at the prior pi^(1/2): logits of balanced recognition plus log(pi) / 2,
samples weighted by n^(1/2) / m. Decisions for the uniform prior do not change.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import UserError
from longtail.posthoc.base import PostHoc
from longtail.posthoc.held_out import HOW_TO_HOLD_OUT, calibrated_logits
from longtail.posthoc.inputs import FitData
from longtail.posthoc.priors import best_scale, sample_weights, shifted, shifted_head


class Wrapper(PostHoc):
    """A step after another post-hoc method, with one number of its own that is chosen on held-out samples."""

    method: PostHoc

    @property
    def wrapped(self) -> PostHoc | None:  # type: ignore[override]
        return self.method

    @property
    def learns_from_seen(self) -> bool:  # type: ignore[override]
        return self.method.learns_from_seen

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        return self.method.needs_features

    @property
    def needs_every_class(self) -> bool:  # type: ignore[override]
        return self.method.needs_every_class

    def enough_images(self, num_classes: int) -> int | None:
        return self.method.enough_images(num_classes)

    @property
    def log_target_(self) -> np.ndarray | None:  # type: ignore[override]
        return self.method.log_target_

    def refitted(self, data: FitData, validation: FitData) -> Self:
        """The same, around the method fitted with other held-out samples."""
        changed = copy.copy(self)
        changed.method = self.method.refitted(data, validation)
        return changed

    @property
    def n_parameters_(self) -> int:
        return self.method.n_parameters_ + 1


class Tempered(Wrapper):
    """A post-hoc method, then a temperature fitted on held-out samples.

    Args:
        method: the calibration; any method that is fitted on training outputs, or HALO.

    Fitted attributes: `temperature_`, `result_` (of the method).

    >>> from longtail.posthoc import LogitAdjustment
    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat([0, 1], [300, 60])
    >>> logits = 10 * (np.eye(2)[y] + rng.normal(size=(360, 2)))
    >>> tempered = Tempered(LogitAdjustment()).fit(logits[::2], y[::2], validation=(logits[1::2], y[1::2]))
    >>> tempered.temperature_ > 3
    True
    """

    needs_validation: ClassVar[bool] = True
    refuses_seen = True
    adds = "temperature"

    def __init__(self, method: PostHoc) -> None:
        self.method = method

    def check_settings(self) -> None:
        if not isinstance(self.method, PostHoc) or self.method.adds or self.method.fitted_on_unseen:
            raise UserError("a temperature follows a method that changes decisions, such as MARC or HALO")
        self.method.check_settings()

    @property
    def chosen_(self) -> dict[str, float]:
        return {**self.method.chosen_, "temperature": self.temperature_}

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        if validation is None:
            raise UserError(
                f"a temperature is fitted on images that the network has not seen, but there are none: "
                f"{HOW_TO_HOLD_OUT}"
            )
        self.method.fit_checked(data, validation, judge=False)
        self.result_ = self.method.result_
        self._fit_temperature(data, validation)

    def refitted(self, data: FitData, validation: FitData) -> Self:
        changed = super().refitted(data, validation)
        changed._fit_temperature(data, validation)
        return changed

    def _fit_temperature(self, data: FitData, validation: FitData) -> None:
        labels = validation.labels.numpy()
        never = np.isneginf(self._ruled_out)
        present = np.flatnonzero((validation.seen_counts > 0) & ~never)
        if len(present) < 2:
            which = "class that the target prior expects" if never.any() else "class"
            raise UserError(f"the held-out samples are of {len(present)} {which}; a temperature needs two at least")
        columns = np.full(data.num_classes, -1)
        columns[present] = np.arange(len(present))
        calibrated = calibrated_logits(self.method, validation)
        evidence = (calibrated.double() - self._target(calibrated))[:, torch.from_numpy(present)]
        half = torch.from_numpy(0.5 * np.log(data.class_counts[present] / data.class_counts.sum()))
        weights, expected = sample_weights(labels, data.class_counts), np.flatnonzero(columns[labels] >= 0)
        scores, codes = evidence[torch.from_numpy(expected)], torch.from_numpy(columns[labels][expected])
        self.temperature_ = 1 / best_scale(scores, codes, half, weights[expected])

    @property
    def _log_target(self) -> np.ndarray:
        target = self.method.log_target_
        return np.zeros(len(self.method.classes_)) if target is None else target

    def _target(self, like: Tensor) -> Tensor:
        """(K,) shift of the method to its target prior; it is not scaled."""
        return torch.from_numpy(np.where(np.isneginf(self._log_target), 0.0, self._log_target)).to(like)

    @property
    def _ruled_out(self) -> np.ndarray:
        """(K,) -inf for a class of target prior 0, which the temperature does not move; 0 for the others."""
        return np.where(np.isneginf(self._log_target), -np.inf, 0.0)

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        calibrated = self.method.transform(logits, features)
        target = self._target(calibrated)
        return shifted((calibrated - target) / self.temperature_ + target, self._ruled_out)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        folded, offset = self.method.fold(weight, bias)
        target = self._target(offset)
        return shifted_head(folded / self.temperature_, (offset - target) / self.temperature_ + target, self._ruled_out)
