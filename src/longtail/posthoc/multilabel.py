"""Calibration of multi-label models: each label is a two-class problem with one logit, `sigmoid(a_k z_k + b_k)`.

    minimise over a_k > 0 and b_k:   sum_i BCE(a_k z_ik + b_k, y_ik) + ridge/2 ((a_k - 1)^2 + b_k^2)

With logits in a small unit, such as cosines, (a_k - 1) is multiplied by their standard deviation, so that the ridge
does not hold the scale back. Then b_k moves by `logit(target prevalence) - logit(prevalence of the samples)`. Scales
and shifts fold into the last linear layer.

The labels are independent, so all are solved together: every pass over the logits gives one Newton step of each label.
Where a step does not lower the loss, a share of an upper bound of the Hessian (the curvature of BCE is at most 1/4) is
added to the Hessian; with all of the bound, the loss always falls.

Papers: Platt, Probabilistic Outputs for Support Vector Machines, 1999; Saerens et al., Adjusting the Outputs of a
Classifier to New a Priori Probabilities, Neural Computation 2002 (the shift to another prevalence).
"""

from __future__ import annotations

import time
import warnings
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from scipy.special import logit
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import validate_data
from torch import Tensor

from longtail.errors import UserError, choose, number, whole_number
from longtail.outputs.checks import Array, as_label_matrix, as_logits, vector
from longtail.outputs.record import Outputs
from longtail.outputs.rows import LogitRows
from longtail.posthoc.affine import AffinePostHoc
from longtail.posthoc.gate import warn
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import FitResult
from longtail.posthoc.solver.affine import SMALLEST_SCALE

CLOSE = 1e-6  # distance to the optimum at the end, in standard errors of the fitted numbers
ROUNDING = 1e-12  # relative, of a loss
FIRST_DAMPING, SMALLEST_DAMPING = 1e-3, 1e-6  # share of the upper bound that is added to a Hessian
USUAL_SPREAD = 4.0  # standard deviation of logits; larger ones are divided at the start
MOST_NAMED = 6  # labels in a warning


class MultiLabelCalibration(AffinePostHoc):
    """One scale and one shift per label of a multi-label (sigmoid) model.

    Fit it on held-out samples: from the training samples of a network it would learn that the network is always right.
    `longtail.calibrate(model, held_out_loader, MultiLabelCalibration())` folds it into the last linear layer. A label
    without positives or without negatives keeps the scale 1, with a warning.

    Args:
        target_prevalence: share of positives that each label will have in deployment: "train" for that of the samples
            of the fit; "balanced" for 0.5, so that `predict` weighs both sides of a label equally; a number; or (K,).
        ridge: pull of scales towards 1 and shifts towards 0: 1 / C of scikit-learn's `LogisticRegression`.
        max_iter: passes over the logits.

    Fitted attributes: `scale_` (K,), `shift_` (K,), `prevalence_` (K,) share of positives in the samples, `result_`.

    >>> logits = np.array([[3.0, 1.0], [1.2, 2.5], [2.0, -1.0], [-2.0, 2.0], [2.5, -3.0]])
    >>> method = MultiLabelCalibration(target_prevalence="balanced")
    >>> method.fit(logits, [[1, 0], [0, 1], [0, 1], [1, 1], [1, 0]]).predict(logits).tolist()
    [[1, 1], [0, 1], [0, 0], [0, 1], [1, 0]]
    """

    fitted_on_unseen = True
    needs_every_class = False
    multilabel = True

    def __init__(
        self, *, target_prevalence: str | float | ArrayLike = "train", ridge: float = 1.0, max_iter: int = 200
    ) -> None:
        self.target_prevalence = target_prevalence
        self.ridge = ridge
        self.max_iter = max_iter

    def check_settings(self) -> None:
        number("ridge", self.ridge, above=0)
        whole_number("max_iter", self.max_iter)
        if isinstance(self.target_prevalence, str):
            choose("target_prevalence", self.target_prevalence, ("train", "balanced"))

    def fit(self, logits: Any, y: Any = None, **others: Any) -> Self:
        """Fit on logits (N, K) of held-out samples and their labels (N, K) of 0 and 1."""
        self.check_settings()
        unused = [name for name, value in others.items() if value is not None]
        if isinstance(logits, Outputs) or unused:
            wrong = ", ".join(unused) or "Outputs, which hold one class per sample"
            raise UserError(f"{type(self).__name__} takes logits (N, K) and labels (N, K), not {wrong}")
        array, truth = as_logits(logits), as_label_matrix(y)
        if array.shape != truth.shape:
            raise UserError(f"logits have shape {tuple(array.shape)}, but labels {tuple(truth.shape)}")
        validate_data(self, logits, skip_check_array=True)  # number and names of the columns
        self.classes_ = np.arange(array.shape[1])
        began = time.perf_counter()
        problem = _Problem(LogitRows(array), truth, self.ridge)
        to_target = self._target_shift(problem)
        x, passes, converged = problem.solve(self.max_iter)
        self.scale_, self.shift_ = x[:, 0].numpy(), x[:, 1].numpy() + to_target
        self.prevalence_ = problem.positives.numpy() / len(truth)
        self.result_ = FitResult(converged, passes, None, time.perf_counter() - began)
        self._require_finite()
        self._warn(problem)
        return self

    def _target_shift(self, problem: _Problem) -> np.ndarray:
        """(K,) shift of the log-odds from the prevalence of the samples to the target."""
        positives, (size, labels) = problem.positives.numpy(), problem.rows.shape
        if isinstance(self.target_prevalence, str) and self.target_prevalence == "train":
            return np.zeros(labels)
        given: Any = 0.5 if isinstance(self.target_prevalence, str) else self.target_prevalence
        target = vector(np.full(labels, given) if np.ndim(given) == 0 else given, labels, "target_prevalence")
        wrong = (target <= 0) | (target >= 1)
        if wrong.any():
            raise UserError(f"target_prevalence must be above 0 and below 1, not {target[wrong][0]:g}")
        # Where all samples or none are positive, half a sample is added to both sides.
        present = np.where(problem.mixed, positives / size, (positives + 0.5) / (size + 1))
        return np.asarray(logit(target) - logit(present))

    def _warn(self, problem: _Problem) -> None:
        """Warn of labels whose fit says little, in one line for each reason."""
        mixed = problem.mixed.numpy()
        separated, reverse = mixed & problem.separated.numpy(), mixed & (self.scale_ <= problem.smallest.numpy())
        names = getattr(self, "feature_names_in_", self.classes_)
        for chosen, reason in (
            (~mixed, "no positive or no negative sample, so the scale stays 1"),
            (
                separated,
                "each positive has a higher logit than any negative, so only the ridge limits the scale; if the "
                "network was trained on these samples, fit on held-out samples",
            ),
            (reverse, "positives do not have higher logits than negatives, so the scale is at its lower bound"),
        ):
            if chosen.any():
                some = ", ".join(map(str, names[chosen][:MOST_NAMED]))
                more = f" and {chosen.sum() - MOST_NAMED} more" if chosen.sum() > MOST_NAMED else ""
                warn(f"label {some}{more}: {reason}")
        if problem.in_unit_interval:
            warn("all logits lie between 0 and 1: if they are probabilities (sigmoids), pass log(p / (1 - p)) instead")
        if not self.result_.converged:
            warnings.warn(
                f"not solved: after {self.result_.iterations} passes some labels are not at their optimum; increase "
                "max_iter or ridge",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        raise UserError(f"{type(self).__name__} takes labels (N, K) of 0 and 1, not one class per sample")

    def _probabilities(self, calibrated: Tensor) -> Tensor:
        return calibrated.sigmoid()

    @overload
    def predict(self, logits: Tensor, features: Any = None) -> Tensor: ...

    @overload
    def predict(self, logits: Outputs | ArrayLike, features: Any = None) -> np.ndarray: ...

    def predict(self, logits: Any, features: Any = None) -> Array:
        """(N, K) 1 for each label whose probability is above one half, else 0."""
        above = self._calibrated(logits, features) > 0
        return above.long() if isinstance(above, Tensor) else above.astype(np.int64)

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.scale_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.classifier_tags.multi_class = False
        return tags


class _Point(NamedTuple):
    """Loss (L,), gradient (L, 2) and Hessian (L, 2, 2) of L labels at their scales and shifts."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor

    def only(self, chosen: Tensor) -> _Point:
        return _Point(*(values[chosen] for values in self))

    def or_if(self, better: Tensor, other: _Point) -> _Point:
        """The other point for the labels at which it is better (L,)."""
        pairs = zip(self, other, strict=True)
        return _Point(*(torch.where(better.view(-1, *[1] * (old.ndim - 1)), new, old) for old, new in pairs))


class _Problem:
    """K logistic regressions on one logit each; a pass over the logits evaluates all of them.

    Attributes:
        positives: (K,) of each label.
        mixed: (K,) whether a label has positives and negatives.
        separated: (K,) whether each positive has a higher logit than any negative.
        in_unit_interval: whether all logits lie between 0 and 1.
        smallest: (K,) lower bounds of the scales.
        start: (K, 2) scales and shifts at the start.
        ridge: (K, 2) of scales and shifts.
        bound: (K, 2, 2) upper bounds of the Hessians at any point.
    """

    def __init__(self, rows: LogitRows, truth: Tensor, ridge: float) -> None:
        self.rows, self.truth = rows, truth
        size, labels = rows.shape
        moments = torch.zeros(3, labels, dtype=torch.float64)
        lowest, highest = torch.full((2, labels), torch.inf), torch.full((2, labels), -torch.inf)
        for where, logits in rows.chunks():
            moments += torch.stack([logits.double().pow(power).sum(0) for power in (2, 1, 0)])
            for side, others in enumerate((truth[where], ~truth[where])):
                lowest[side] = torch.minimum(lowest[side], logits.masked_fill(others, torch.inf).amin(0))
                highest[side] = torch.maximum(highest[side], logits.masked_fill(others, -torch.inf).amax(0))
        self.positives = truth.sum(0)
        self.mixed = (self.positives > 0) & (self.positives < size)
        self.separated = lowest[1] > highest[0]
        self.in_unit_interval = bool(lowest.amin() >= 0) and bool(highest.amax() <= 1)
        spread = (moments[0] / size - (moments[1] / size).square()).clamp(min=0).sqrt()
        self.smallest = SMALLEST_SCALE / spread.clamp(min=1)
        self.start = torch.stack([(USUAL_SPREAD / spread).clamp(max=1), torch.zeros(labels)], 1)
        self.ridge = ridge * torch.stack([spread.clamp(SMALLEST_SCALE, 1).square(), torch.ones(labels)], 1)
        self.bound = self._hessian(moments / 4, self.ridge)

    @staticmethod
    def _hessian(sums: Tensor, ridge: Tensor) -> Tensor:
        """(L, 2, 2) from the sums (3, L) of curvature times z^2, z and 1, and the ridge (L, 2)."""
        squares, products, ones = sums
        return torch.stack([squares, products, products, ones], 1).view(-1, 2, 2) + torch.diag_embed(ridge)

    def at(self, x: Tensor, labels: Tensor) -> _Point:
        """Losses of some labels (L,) at their scales and shifts x (L, 2), in one pass."""
        sums = torch.zeros(6, len(labels), dtype=torch.float64)
        for where, chunk in self.rows.chunks():
            logits, truth = chunk[:, labels].double(), self.truth[where][:, labels].double()
            scores = logits * x[:, 0] + x[:, 1]
            shares = scores.sigmoid()
            error, curvature = shares - truth, shares * (1 - shares)
            sums[0] += (F.softplus(scores) - truth * scores).sum(0)
            sums[1:3] += torch.stack([(error * logits).sum(0), error.sum(0)])
            sums[3:] += torch.stack(
                [(curvature * logits * logits).sum(0), (curvature * logits).sum(0), curvature.sum(0)]
            )
        pull, ridge = x - torch.tensor([1.0, 0.0]), self.ridge[labels]
        value = sums[0] + 0.5 * (ridge * pull.square()).sum(1)
        return _Point(value, sums[1:3].T + ridge * pull, self._hessian(sums[3:], ridge))

    def solve(self, max_iter: int) -> tuple[Tensor, int, bool]:
        """Scales and shifts (K, 2), the number of passes, and whether each label is at its optimum."""
        x = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(len(self.start), 1)
        x[self.mixed] = self.start[self.mixed]
        passes, converged = self._newton(x, self.mixed.nonzero().flatten(), max_iter)
        # The loss is convex: if its optimum has a scale below the bound, the best allowed scale is the bound.
        low = (self.mixed & (x[:, 0] < self.smallest)).nonzero().flatten()
        if len(low):
            x[low, 0] = self.smallest[low]
            more, also = self._newton(x, low, max_iter, held_scale=True)
            passes, converged = passes + more, converged and also
        return x, passes, converged

    def _newton(self, x: Tensor, labels: Tensor, max_iter: int, *, held_scale: bool = False) -> tuple[int, bool]:
        """Move x (K, 2) of some labels (L,) to their optimum; a label that is there takes no part in further passes."""
        if not len(labels):
            return 0, True
        free = torch.tensor([not held_scale, True], dtype=torch.float64)
        still = torch.outer(free, free), torch.diag(1 - free)

        def steps(point: _Point, damping: Tensor, bound: Tensor) -> Tensor:
            hessian = point.hessian + damping.view(-1, 1, 1) * bound
            return torch.linalg.solve(hessian * still[0] + still[1], point.gradient * free)

        point, damping = self.at(x[labels], labels), torch.zeros(len(labels), dtype=torch.float64)
        for passes in range(1, max_iter + 1):
            newton = steps(point, torch.zeros_like(damping), self.bound[labels])
            far = (newton * point.gradient).sum(1) > CLOSE**2  # the squared distance in standard errors
            if not bool(far.any()):
                return passes, True
            if passes == max_iter:
                break
            labels, point, damping = labels[far], point.only(far), damping[far]
            step = steps(point, damping, self.bound[labels])
            trial = self.at(x[labels] - step, labels)
            lower = trial.value <= point.value + ROUNDING * (1 + point.value.abs())
            x[labels[lower]] -= step[lower]
            point = point.or_if(lower, trial)
            less = torch.where(damping > SMALLEST_DAMPING, damping / 10, 0.0)
            damping = torch.where(lower, less, (10 * damping).clamp(min=FIRST_DAMPING))
        return max_iter, False
