"""Logit adjustment: take the training prior out of the logits.

`z_j - tau * log(pi_j)` with pi the share of class j in the training set. Nothing is trained.

Paper: Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021. (The released code adds
1e-12 inside the logarithm; the formula is followed here.)
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtail.outputs.checks import require_every_class
from longtail.posthoc.affine import Formula, TauPostHoc
from longtail.posthoc.inputs import FitData


class LogitAdjustment(TauPostHoc):
    """Post-hoc logit adjustment.

    Args:
        tau: strength; "auto" to choose it from 0, 0.1, …, 2 on the held-out outputs given as `validation`.

    Fitted attributes: `tau_`, `scale_` (K,), `shift_` (K,).

    >>> method = LogitAdjustment().fit(np.array([[1.0, 0.9], [2.0, 0.0], [1.0, 0.0]]), [1, 0, 0])
    >>> method.predict(np.array([[1.0, 0.9]])).tolist()
    [1]
    """

    def __init__(self, tau: float | Literal["auto"] = 1.0) -> None:
        self.tau = tau

    def _formula(self, data: FitData) -> Formula:
        require_every_class(data.class_counts)
        log_prior = np.log(data.class_counts / data.class_counts.sum())
        return lambda tau: (np.ones(data.num_classes), -tau * log_prior)
