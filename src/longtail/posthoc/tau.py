"""What methods with one strength, tau, share: nothing is trained, and tau is given or chosen on held-out outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import numpy as np

from longtail.posthoc.base import AffinePostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.result import FitResult
from longtail.posthoc.selection import TAUS, balanced_accuracy, best_setting, require_validation
from longtail.posthoc.settings import number_or_auto

USUAL_TAU = 1.0
Formula = Callable[[float], tuple[np.ndarray, np.ndarray]]  # tau → scale (K,), shift (K,)


class TauPostHoc(AffinePostHoc):
    """Methods whose scale and shift follow from tau in closed form; subclasses give the formula."""

    tuned = ("tau",)
    needs_every_class = False
    learns_from_seen = False

    tau: float | Literal["auto"]

    @abstractmethod
    def _formula(self, data: FitData) -> Formula:
        """Scale and shift as functions of tau."""

    def check_settings(self) -> None:
        number_or_auto(self.tau, "tau")

    def enough_images(self, num_classes: int) -> int | None:
        return 1  # it does not use images

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        formula = self._formula(data)
        if self.tau == "auto":
            held_out = require_validation(validation, "tau")
            scores = {tau: balanced_accuracy(*formula(tau), held_out) for tau in TAUS}
            self.tau_ = best_setting(scores, usual=USUAL_TAU)
        else:
            self.tau_ = float(self.tau)
        self.scale_, self.shift_ = formula(self.tau_)
        self.result_ = FitResult.closed_form()

    @property
    def n_parameters_(self) -> int:
        return 0
