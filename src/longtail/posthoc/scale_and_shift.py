"""What methods with one scale and one shift per class share: a convex problem, solved from the unchanged classifier.

Two classes have one margin, the difference of their logits, and only that decides. So their logits are centred before
the fit, and both get the same scale: different ones would change the order of samples by what means nothing.
A scale below zero would reverse the order of a class's logits. So scales stay above a bound, and the optimum under it
is found by an active set: classes that would fall below it are held there, and the rest is solved again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.outputs.rows import LogitRows
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.settings import (
    TAUS,
    balanced_accuracy,
    best_setting,
    check_exact,
    number_or_auto,
    require_validation,
)
from longtail.posthoc.solver import FitResult, Problem, Solution, minimise
from longtail.posthoc.solver.curvature import Blocks

SMALLEST_SCALE = 1e-3
RELEASES = 5  # rounds of the active set in which a held scale may be freed again
USUAL_TAU = 1.0
Formula = Callable[[float], tuple[np.ndarray, np.ndarray]]  # tau → scale (K,), shift (K,)


def identity(num_classes: int) -> np.ndarray:
    """(2K,) scales 1, then shifts 0: the unchanged classifier.

    >>> identity(2).tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    return np.repeat([1.0, 0.0], num_classes)


def with_margins(data: FitData) -> FitData:
    """The same samples, the logits of two classes minus their mean; more classes are returned as they are."""
    if data.num_classes != 2:
        return data
    logits = data.rows.read(slice(None))
    return replace(data, rows=LogitRows(logits - logits.mean(1, keepdim=True)))


def split_solution(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales (K,) and shifts (K,) of [scale, shift] (2K,); those of two margins have the same scale up to rounding."""
    scale, shift = np.split(x, 2)
    return (np.full(2, scale.mean()) if len(scale) == 2 else scale), shift


class _HeldScales(Problem):
    """A paired problem in which the scales of some classes (K,) stay where they are."""

    paired = True

    def __init__(self, problem: Problem, held: np.ndarray) -> None:
        self.problem, self.held = problem, held
        self.fixed = np.concatenate([held, np.zeros(len(held), dtype=bool)])

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.problem.value_and_gradient(x)
        return value, np.where(self.fixed, 0.0, gradient)

    def with_blocks(self, x: np.ndarray) -> tuple[float, np.ndarray, Blocks]:
        value, gradient, blocks = self.problem.with_blocks(x)
        aa, ab = np.where(self.held, 1.0, blocks.aa), np.where(self.held, 0.0, blocks.ab)
        return value, np.where(self.fixed, 0.0, gradient), replace(blocks, aa=aa, ab=ab)

    @property
    def unit(self) -> float:
        return self.problem.unit

    @property
    def rounding(self) -> float:
        return self.problem.rounding

    def refine(self) -> bool:
        return self.problem.refine()


def minimise_positive(problem: Problem, start: np.ndarray, **settings: Any) -> Solution:
    """`minimise` over [scale, shift] with every scale at least `SMALLEST_SCALE`; dearer only if one would be less."""
    solution = minimise(problem, start, **settings)
    classes = len(start) // 2
    held = np.zeros(classes, dtype=bool)
    below = solution.x[:classes] < SMALLEST_SCALE
    if not below.any():
        return solution
    settings["first"] = settings.get("first") or float(np.abs(problem.value_and_gradient(start)[1]).max())
    settings["memory"] = None
    passes = solution.evaluations + 1
    for number in range(classes + RELEASES):
        slopes = problem.value_and_gradient(solution.x)[1][:classes]
        wanted = below | (held & ((slopes >= 0) | (number >= RELEASES)))
        if (wanted == held).all():
            break
        held = wanted
        begin = solution.x.copy()
        begin[:classes][held] = SMALLEST_SCALE
        solution = minimise(_HeldScales(problem, held), begin, **settings)
        below = (solution.x[:classes] < SMALLEST_SCALE) & ~held
        passes += solution.evaluations + 1
    return replace(solution, evaluations=passes)


class ScaleAndShift(PostHoc):
    """Methods that solve for [scale, shift]; subclasses give the problem and have these three settings.

    Args:
        ridge: weight decay.
        tolerance: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data.
    """

    ridge: float
    tolerance: float
    max_iter: int

    scale_: np.ndarray
    shift_: np.ndarray

    @abstractmethod
    def _problem(self, data: FitData) -> Problem:
        """What is minimised over [scale, shift] (2K,)."""

    def check_settings(self) -> None:
        check_exact(self.ridge, self.tolerance, self.max_iter)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        start = identity(data.num_classes)
        solution = minimise_positive(
            self._problem(with_margins(data)), start, tolerance=self.tolerance, max_evaluations=self.max_iter
        )
        self.scale_, self.shift_ = split_solution(solution.x)
        self.result_ = FitResult.of(solution)

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.scale_)


class AffinePostHoc(PostHoc):
    """Methods that are a scale and a shift per class: they fold into the head.

    Subclasses set `scale_` (K,) and `shift_` (K,): calibrated logits are `scale_ * logits + shift_`.
    """

    scale_: np.ndarray
    shift_: np.ndarray

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        scale, shift = (torch.as_tensor(v).to(logits.dtype).to(logits.device) for v in (self.scale_, self.shift_))
        return logits * scale + shift

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        return folded_affine(weight, bias, self.scale_, self.shift_)


def folded_affine(weight: Tensor, bias: Tensor | None, scale: np.ndarray, shift: np.ndarray) -> tuple[Tensor, Tensor]:
    """Weight (K, D) and bias (K,) of the layer that returns `scale * logits + shift`."""
    # On the CPU, because not every device computes in float64.
    factor, offset = torch.as_tensor(scale).double(), torch.as_tensor(shift).double()
    old = torch.zeros(len(weight)) if bias is None else bias.cpu()
    folded = factor.unsqueeze(1) * weight.cpu().double(), factor * old.double() + offset
    return folded[0].to(weight.dtype).to(weight.device), folded[1].to(weight.dtype).to(weight.device)


class TauPostHoc(AffinePostHoc):
    """Methods with one strength, tau, from which scale and shift follow in closed form; subclasses give the formula."""

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
        return 1  # the fit does not depend on images

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
