"""Platt scaling: one sigmoid per class against the rest, `sigmoid(a_j z_j + b_j)`, 2K numbers.

With two classes the sigmoid is that of the margin, as in the paper: `z_j` is the logit minus the mean of both.
Probabilities are the sigmoids, divided by their sum. So the calibrated logits are the logarithms of
the sigmoids: their softmax is exactly that. A sigmoid does not fold into a linear head; `head` gives a
separate layer. Fit it on held-out outputs: a network is overconfident on its training images.

Paper: Platt, Probabilistic Outputs for Support Vector Machines, 1999.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.heads.kinds import SigmoidHead
from longtail.outputs.rows import LogitRows
from longtail.posthoc.affine import ScaleAndShift, folded_affine, identity
from longtail.posthoc.base import is_trained
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import Problem
from longtail.posthoc.solver.lbfgs import Blocks


def _scores(logits: Tensor) -> Tensor:
    """Logits (N, K); of two classes minus their mean, which means nothing for the classifier, but for a sigmoid."""
    return logits - logits.mean(1, keepdim=True) if logits.shape[1] == 2 else logits


class _OneVersusRest(Problem):
    """K logistic regressions on one number each: `sum_j mean_i BCE(sigmoid(a_j z_ij + b_j), t_ij)`."""

    paired = True

    def __init__(self, rows: LogitRows, labels: Tensor, ridge: float) -> None:
        self.rows = rows
        self.labels = labels
        self.ridge = ridge
        size, classes = rows.shape
        positives = torch.bincount(labels, minlength=classes).double()
        # Platt's targets: a little inside 0 and 1, so that a perfectly separated class has a finite solution.
        self.high = (positives + 1) / (positives + 2)
        self.low = 1 / (size - positives + 2)

    def _chunks(self, x: np.ndarray) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Logits, scores and targets of each chunk."""
        a, b = torch.from_numpy(x).chunk(2)
        for rows, logits in self.rows.chunks():
            positive = F.one_hot(self.labels[rows], len(a)).bool()
            yield logits.double(), a * logits.double() + b, torch.where(positive, self.high, self.low)

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        pull = x - identity(len(x) // 2)
        value, gradient = 0.5 * self.ridge * float(pull @ pull), self.ridge * pull
        size = self.rows.shape[0]
        for logits, scores, targets in self._chunks(x):
            losses = F.softplus(scores) - targets * scores
            value += float(losses.sum()) / size
            error = (scores.sigmoid() - targets) / size
            gradient = gradient + torch.cat([(error * logits).sum(0), error.sum(0)]).numpy()
        return value, gradient

    def with_blocks(self, *points: np.ndarray) -> tuple[list[tuple[float, np.ndarray]], Blocks]:
        x = points[-1]
        sums = torch.zeros(3, len(x) // 2, dtype=torch.float64)
        for logits, scores, _ in self._chunks(x):
            curvature = scores.sigmoid() * (-scores).sigmoid() / self.rows.shape[0]
            for power in (0, 1, 2):
                sums[power] += (curvature * logits**power).sum(0)
        bb, ab, aa = sums.numpy()
        bb = bb + self.ridge
        blocks = Blocks(aa + self.ridge, ab, bb, reach=np.sqrt(bb))
        return [self.value_and_gradient(point) for point in points], blocks


class PlattScaling(ScaleAndShift):
    """One sigmoid per class against the rest; probabilities are the sigmoids, made to sum to 1.

    Args:
        ridge: pull towards the identity.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.

    Fitted attributes: `scale_` (K,), `shift_` (K,), `result_`.
    """

    fitted_on_unseen = True

    def __init__(self, *, ridge: float = 1e-8, tolerance: float = 1e-6, max_iter: int = 500) -> None:
        self.ridge = ridge
        self.tolerance = tolerance
        self.max_iter = max_iter

    def _problem(self, data: FitData) -> _OneVersusRest:
        return _OneVersusRest(data.rows, data.labels, self.ridge)

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        scale, shift = (torch.as_tensor(v).to(logits) for v in (self.scale_, self.shift_))
        return F.logsigmoid(_scores(logits) * scale + shift)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        raise UserError(
            "PlattScaling does not fold into a linear head: its probabilities are sigmoids. Use its head(linear) layer"
        )

    def head(self, linear: nn.Linear) -> nn.Module:
        old = None if linear.bias is None else _scores(linear.bias.detach().unsqueeze(0)).squeeze(0)
        weight, bias = folded_affine(_scores(linear.weight.detach().T).T, old, self.scale_, self.shift_)
        layer = SigmoidHead(linear.in_features, linear.out_features)
        layer = layer.to(linear.weight.device, linear.weight.dtype)
        with torch.no_grad():
            layer.classifier.weight.copy_(weight)
            layer.classifier.bias.copy_(bias)
        return layer.requires_grad_(is_trained(linear))
