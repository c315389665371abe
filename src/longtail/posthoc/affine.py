"""Methods with one scale and one shift per class: base classes, the solve, and settings that several methods share.

Two classes have one margin, the difference of their logits, and only that decides. So their logits are centred before
the fit, and both get the same scale: different ones would change the order of samples by what means nothing.
A scale below zero would reverse the order of a class's logits. So scales stay above a bound, and the optimum under it
is found by an active set: classes that would fall below it are held there, and the rest is solved again.
A setting "auto" is chosen on held-out outputs, never on the training images and never on the test split.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import UserError, number, whole_number
from longtail.metrics.scores import evaluate_predictions
from longtail.outputs.rows import LogitRows
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import FitResult, Problem, Solution, minimise
from longtail.posthoc.solver.affine import SMALLEST_SCALE, AffineProblem

RELEASES = 5  # rounds of the active set in which a held scale may be freed again
TAUS = GAMMAS = tuple(round(0.1 * step, 1) for step in range(21))  # candidates of "auto"
USUAL_TAU = 1.0
INTERPOLATED = 5  # solutions that the start of another one is interpolated from
# Settings of several methods: their bounds, and the smallest of whole numbers.
NUMBERS: dict[str, dict[str, float]] = {"ridge": {"at_least": 0}, "tolerance": {"above": 0}, "lr": {"above": 0}}
WHOLE_NUMBERS = {"max_iter": 1, "batch_size": 1, "seed": 0}
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
    for step in range(classes + RELEASES):
        slopes = problem.value_and_gradient(solution.x)[1][:classes]
        wanted = below | (held & ((slopes >= 0) | (step >= RELEASES)))
        if (wanted == held).all():
            break
        held = wanted
        begin = solution.x.copy()
        begin[:classes][held] = SMALLEST_SCALE
        solution = minimise(problem, begin, held=held, **settings)
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
        check_numbers(self)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        problem = self._problem(with_margins(data))
        start = problem.centre if isinstance(problem, AffineProblem) else identity(data.num_classes)
        solution = minimise_positive(problem, start, tolerance=self.tolerance, max_evaluations=self.max_iter)
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


def check_numbers(method: PostHoc) -> None:
    """Refuse wrong settings of the exact solver and of gradient steps, which several methods have.

    A `max_iter` of None is the method's default.
    """
    for name, value in method.get_params(deep=False).items():
        if name in NUMBERS:
            number(name, value, **NUMBERS[name])
        elif name in WHOLE_NUMBERS and not (name == "max_iter" and value is None):
            whole_number(name, value, at_least=WHOLE_NUMBERS[name])


def number_or_auto(value: object, name: str, **bounds: float) -> None:
    """A setting is "auto" or a number within bounds."""
    try:
        if value != "auto":
            number(name, value, **bounds)
    except UserError as error:
        raise UserError(f'{error}; or "auto"') from error


def require_validation(validation: FitData | None, setting: str) -> FitData:
    """The held-out outputs, or an error that explains why they are needed."""
    if validation is None:
        raise UserError(
            f'{setting}="auto" needs held-out outputs: fit(…, validation=outputs or (logits, y)), on the command line '
            "--validation FILE. Logits of training images are overconfident and lead to a bad choice"
        )
    order = np.argsort(-validation.class_counts, kind="stable")
    if not validation.seen_counts[order[len(order) // 2 :]].any():
        raise UserError(
            f'{setting}="auto" uses balanced accuracy, but only the larger classes have held-out samples; '
            "hold out images of every class (longtail train --validation 0.1), or use HALO"
        )
    return validation


def balanced_accuracy(scale: np.ndarray, shift: np.ndarray, held_out: FitData) -> float:
    """Mean accuracy of the classes when logits become `scale * logits + shift`."""
    factor, offset = torch.from_numpy(scale).float(), torch.from_numpy(shift).float()
    best = [torch.addcmul(offset, logits, factor).argmax(1) for _, logits in held_out.rows.chunks()]
    return evaluate_predictions(torch.cat(best), held_out.labels, held_out.class_counts).balanced


def best_setting(scores: dict[float, float], usual: float) -> float:
    """The setting with the best score; of equally good ones the nearest to the usual.

    >>> best_setting({0.0: 0.5, 0.9: 0.7, 1.4: 0.7}, usual=1.0)
    0.9
    """
    return max(scores, key=lambda setting: (scores[setting], -abs(setting - usual)))


def interpolated(solutions: Mapping[float, np.ndarray], setting: float) -> np.ndarray:
    """The solution for one setting, extrapolated or interpolated by a polynomial through those of the nearest settings.

    No two of these are closer to each other than this setting is to the nearest: a polynomial through a close group
    says nothing about settings far from it.

    >>> interpolated({0.0: np.array([0.0]), 1.0: np.array([1.0]), 3.0: np.array([9.0])}, 2.0).tolist()
    [4.0]
    """
    nearest: list[float] = []
    for one in sorted(solutions, key=lambda other: abs(other - setting)):
        apart = min((abs(one - other) for other in nearest), default=np.inf)
        if len(nearest) < INTERPOLATED and apart > 0.99 * abs(setting - (nearest or [one])[0]):
            nearest.append(one)
    shares = [
        np.prod([(setting - other) / (one - other) for other in nearest if other != one], initial=1.0)
        for one in nearest
    ]
    return np.asarray(sum(share * solutions[one] for share, one in zip(shares, nearest, strict=True)))
