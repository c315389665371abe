"""LWS: learn one scale per class of a frozen classifier, as if all classes were equally frequent.

Logits `s_j * (W_j f + b_j)` (the bias is scaled too, as in the released code), cross-entropy under
class-balanced sampling. On stored outputs that expectation is a weighted sum in which every class
has the same weight, and the problem is convex: it is solved to its optimum instead of sampled.

Paper: Kang et al., Decoupling Representation and Classifier for Long-Tailed Recognition, ICLR 2020.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from longtail.posthoc.affine import AffinePostHoc, ScaleAndShift, identity
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver.affine import AffineProblem, ridge_per_number
from longtail.posthoc.solver.linear import balanced_weights


class LWS(ScaleAndShift, AffinePostHoc):
    """Learnable weight scaling. Two classes share one scale, which changes no decision: use MARC there.

    Args:
        ridge: weight decay of the scales, towards 1, at ten classes; multiplied by 10 / K, as MARC's is.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.

    Fitted attributes: `scale_` (K,), `shift_` (K,, zeros), `result_`.
    """

    stage_two: ClassVar[dict[str, str]] = {"ridge": "weight_decay"}

    def __init__(self, *, ridge: float = 5e-4, tolerance: float = 1e-5, max_iter: int = 500) -> None:
        self.ridge = ridge
        self.tolerance = tolerance
        self.max_iter = max_iter

    def _problem(self, data: FitData) -> AffineProblem:
        return AffineProblem(
            data.rows,
            data.labels,
            balanced_weights(data.labels, data.num_classes),
            torch.ones(data.num_classes),
            ridge=ridge_per_number(self.ridge, data.num_classes),
            centre=identity(data.num_classes),
            shifts=False,
            world=data.world,
        )

    @property
    def n_parameters_(self) -> int:
        return len(self.scale_)
