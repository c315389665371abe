"""Logit adjustment: take the training prior out of the logits.

`z_j - tau * log(pi_j)` with pi the share of class j in the training set. Nothing is trained.

Paper: Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021. (The released code adds
1e-12 inside the logarithm; the formula is followed here.)
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtail.outputs.checks import require_counts
from longtail.posthoc.base import AffinePostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.result import FitResult
from longtail.posthoc.selection import TAUS, balanced_accuracy, best_setting, require_validation
from longtail.posthoc.settings import number_or_auto


class LogitAdjustment(AffinePostHoc):
    """Post-hoc logit adjustment.

    Args:
        tau: strength; "auto" to choose it from 0, 0.1, …, 2 on the held-out outputs given as `validation`.

    Fitted attributes: `tau_`, `scale_` (K,), `shift_` (K,).

    >>> method = LogitAdjustment().fit(np.array([[1.0, 0.9], [2.0, 0.0], [1.0, 0.0]]), [1, 0, 0])
    >>> method.predict(np.array([[1.0, 0.9]])).tolist()
    [1]
    """

    tuned = ("tau",)
    needs_every_class = False
    learns_from_seen = False

    def __init__(self, tau: float | Literal["auto"] = 1.0) -> None:
        self.tau = tau

    def check_settings(self) -> None:
        number_or_auto(self.tau, "tau")

    def enough_images(self, num_classes: int) -> int | None:
        return 1  # it does not use images

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        require_counts(data.class_counts)
        log_prior = np.log(data.class_counts / data.class_counts.sum())
        self.scale_ = np.ones(data.num_classes)
        if self.tau == "auto":
            held_out = require_validation(validation, "tau")
            scores = {tau: balanced_accuracy(self.scale_, -tau * log_prior, held_out) for tau in TAUS}
            self.tau_ = best_setting(scores, usual=1.0)
        else:
            self.tau_ = float(self.tau)
        self.shift_ = -self.tau_ * log_prior
        self.result_ = FitResult.closed_form()

    @property
    def n_parameters_(self) -> int:
        return 0
