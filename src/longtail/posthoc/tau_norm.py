"""Tau-normalisation: make the class vectors of the head more equal in length.

`W_j / |W_j|^tau`, the bias is dropped (at tau 0 too, as in the released code). Nothing is trained;
tau is chosen on held-out data, never on the test split.

Paper: Kang et al., Decoupling Representation and Classifier for Long-Tailed Recognition, ICLR 2020.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtail.posthoc.base import AffinePostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.result import FitResult
from longtail.posthoc.selection import TAUS, balanced_accuracy, best_setting, require_validation
from longtail.posthoc.settings import number_or_auto


class TauNorm(AffinePostHoc):
    """Tau-normalisation.

    Args:
        tau: power of the norms; "auto" to choose it from 0, 0.1, …, 2 by balanced accuracy on the held-out
            outputs given as `validation`.

    Needs the norms of the head's class vectors and its bias: fit on `Outputs`, or give `weight_norms`
    and `head_bias`. Fitted attributes: `tau_`, `scale_` (K,), `shift_` (K,).
    """

    tuned = ("tau",)
    needs_every_class = False

    learns_from_seen = False

    def __init__(self, tau: float | Literal["auto"] = "auto") -> None:
        self.tau = tau

    def check_settings(self) -> None:
        number_or_auto(self.tau, "tau")

    def enough_images(self, num_classes: int) -> int | None:
        return 1  # it does not use images

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        bias = np.zeros(data.num_classes) if data.bias is None else data.bias.double().numpy()

        def calibrated(tau: float) -> tuple[np.ndarray, np.ndarray]:
            scale = data.weight_norms**-tau
            return scale, -scale * bias

        if self.tau == "auto":
            held_out = require_validation(validation, "tau")
            scores = {tau: balanced_accuracy(*calibrated(tau), held_out) for tau in TAUS}
            self.tau_ = best_setting(scores, usual=1.0)
        else:
            self.tau_ = float(self.tau)
        self.scale_, self.shift_ = calibrated(self.tau_)
        self.result_ = FitResult.closed_form()

    @property
    def n_parameters_(self) -> int:
        return 0
