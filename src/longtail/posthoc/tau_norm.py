"""Tau-normalisation: make the class vectors of the head more equal in length.

`W_j / |W_j|^tau`, the bias is dropped (at tau 0 too, as in the released code). Nothing is trained;
tau is chosen on held-out data, never on the test split.

Paper: Kang et al., Decoupling Representation and Classifier for Long-Tailed Recognition, ICLR 2020.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtail.posthoc.affine import Formula, TauPostHoc
from longtail.posthoc.inputs import FitData


class TauNorm(TauPostHoc):
    """Tau-normalisation.

    Args:
        tau: power of the norms; "auto" to choose it from 0, 0.1, …, 2 by balanced accuracy on the held-out
            outputs given as `validation`.

    Needs the norms of the head's class vectors and its bias: fit on `Outputs`, or give `weight_norms`
    and `head_bias`. Fitted attributes: `tau_`, `scale_` (K,), `shift_` (K,).
    """

    def __init__(self, tau: float | Literal["auto"] = "auto") -> None:
        self.tau = tau

    def _formula(self, data: FitData) -> Formula:
        bias = np.zeros(data.num_classes) if data.bias is None else data.bias.double().numpy()

        def formula(tau: float) -> tuple[np.ndarray, np.ndarray]:
            scale = data.weight_norms**-tau
            return scale, -scale * bias

        return formula
