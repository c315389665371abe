"""MARC: learn one scale and one shift per class for the margins of a frozen classifier.

A margin is the distance to a class's hyperplane, `d_j = eta_j / |W_j|`. The calibrated margin is
`omega_j * d_j + beta_j`, so the calibrated logit is `omega_j * eta_j + beta_j * |W_j|`: 2K numbers,
learnt on training images with the loss `mean_i U_{y_i} CE_i`,
`U_c = K (1 / n_c)^gamma / sum_j (1 / n_j)^gamma`; omega stays above zero. Samples that are not distributed like the
training set (a balanced list, a few images per class) are weighted so that they stand for it. Two classes have one
margin: their logits are centred, and both get the same omega.

Paper: Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from longtail.errors import choose
from longtail.outputs.record import Outputs
from longtail.posthoc.affine import (
    GAMMAS,
    AffinePostHoc,
    balanced_accuracy,
    best_setting,
    check_numbers,
    identity,
    interpolated,
    minimise_positive,
    number_or_auto,
    require_validation,
    split_solution,
    with_margins,
)
from longtail.posthoc.base import unfitted
from longtail.posthoc.gate import warn
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import FitResult, Solution
from longtail.posthoc.solver.affine import AffineProblem, ridge_per_number
from longtail.posthoc.solver.sgd import train_affine

PAPER_GAMMA = 1.2
EXACT_PASSES, SGD_STEPS = 500, 2000
RELEASE_WARMUP = 800  # steps
ENOUGH_IMAGES, FEWEST_IMAGES = 800, 50
COARSE = 4  # every so many gammas are compared before those around the best of them
ROUGH = 3e-4  # tolerance that is enough to compare gammas
HARDLY_FALLEN = 0.5  # gradient after SGD, relative to the start; the paper's stage two ends at 0.01 to 0.45


def class_weights(class_counts: np.ndarray, gamma: float) -> np.ndarray:
    """U (K,): weights proportional to n^-gamma that sum to K.

    >>> class_weights(np.array([100, 1]), gamma=0.5).round(3).tolist()
    [0.182, 1.818]
    """
    # Relative to the smallest class, so that no power overflows.
    counts = np.asarray(class_counts, dtype=np.float64)
    weights = (counts.min() / counts) ** gamma
    return len(weights) * weights / weights.sum()


class MARC(AffinePostHoc):
    """Margin calibration.

    Args:
        gamma: strength of the class weights; 0 for none, "auto" to choose it by balanced accuracy on the
            held-out outputs given as `validation`.
        solver: "exact" solves the convex problem to its optimum; "sgd" is the paper's stage two.
        ridge: weight decay of omega and beta at ten classes, times the mean weight of a sample. The exact solver also
            multiplies it by 10 / K: a class has about 1 / K of the loss, so it weighs as much beside it whatever the
            number of classes. "sgd" takes it as the optimiser's weight decay.
        ridge_centre: where it pulls to: "identity" (omega 1, beta 0: the unchanged classifier), or "zero" as the
            paper's weight decay does.
        tolerance: exact: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data (exact; default 500) or steps (sgd; default 2,000).
        batch_size: sgd: samples per step.
        lr: sgd: learning rate at the start; falls to 0 along a cosine.
        schedule: sgd: "paper" as above; "release": it first rises to twice `lr` in 800 steps (the released code).
        divide_by: sgd: what the loss of a batch is divided by: its size (the paper) or the sum of its
            weights (the released code).
        seed: sgd: decides the batches.

    Fitted attributes: `omega_` (K,), `beta_` (K,), `gamma_`, `weight_norms_` (K,), `result_`.

    >>> logits = np.array([[3.0, 0.0], [2.0, 1.0], [1.5, 1.0], [1.0, 0.8]])
    >>> marc = MARC().fit(logits, [0, 0, 0, 1])
    >>> marc.predict(logits).tolist()
    [0, 0, 0, 1]
    """

    tuned = ("gamma",)
    stage_two: ClassVar[dict[str, str]] = {"ridge": "weight_decay", "batch_size": "batch_size", "max_iter": "steps"}

    omega_: np.ndarray
    beta_: np.ndarray

    def __init__(
        self,
        gamma: float | Literal["auto"] = PAPER_GAMMA,
        solver: Literal["exact", "sgd"] = "exact",
        *,
        ridge: float = 5e-4,
        ridge_centre: Literal["identity", "zero"] = "identity",
        tolerance: float = 1e-5,
        max_iter: int | None = None,
        batch_size: int = 512,
        lr: float = 0.05,
        schedule: Literal["paper", "release"] = "paper",
        divide_by: Literal["batch", "weights"] = "batch",
        seed: int = 0,
    ) -> None:
        self.gamma = gamma
        self.solver = solver
        self.ridge = ridge
        self.ridge_centre = ridge_centre
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.lr = lr
        self.schedule = schedule
        self.divide_by = divide_by
        self.seed = seed

    def check_settings(self) -> None:
        number_or_auto(self.gamma, "gamma", at_least=0)
        choose("solver", self.solver, ("exact", "sgd"))
        choose("ridge_centre", self.ridge_centre, ("identity", "zero"))
        choose("schedule", self.schedule, ("paper", "release"))
        choose("divide_by", self.divide_by, ("batch", "weights"))
        check_numbers(self)

    def enough_images(self, num_classes: int) -> int | None:
        """Measured: within 0.1 points of all images in the mean of draws (docs/results/images_per_class.md).

        Classes share what they learn about each other, so with many classes fewer images of each are enough.
        """
        return None if self.solver == "sgd" else max(FEWEST_IMAGES, math.ceil(ENOUGH_IMAGES / math.sqrt(num_classes)))

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        data = with_margins(data)
        if self.gamma == "auto":
            solution, gamma = self._choose_gamma(data, validation)
        else:
            gamma = float(self.gamma)
            solution = self._solve(data, gamma)
        self._set_solution(solution, gamma, data)

    def _set_solution(self, solution: Solution, gamma: float, data: FitData) -> None:
        self.gamma_ = gamma
        self.omega_, self.beta_ = split_solution(solution.x)
        self.weight_norms_ = data.weight_norms
        self.scale_, self.shift_ = self.omega_, self.beta_ * self.weight_norms_
        self.result_ = FitResult.of(solution)

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.omega_)

    def problem(self, data: FitData, weights: Tensor) -> AffineProblem:
        """The convex problem of these class weights (K,)."""
        centre = identity(data.num_classes)
        return AffineProblem(
            data.rows,
            data.labels,
            weights[data.labels] / len(data.labels),
            torch.from_numpy(data.weight_norms),
            ridge=ridge_per_number(self.ridge, data.num_classes),
            centre=centre if self.ridge_centre == "identity" else np.zeros_like(centre),
            world=data.world,
        )

    def _solve(self, data: FitData, gamma: float) -> Solution:
        weights = class_weights(data.class_counts, gamma)
        if self.solver == "sgd":
            return self._train(data, torch.from_numpy(weights * data.frequency))
        return minimise_positive(
            self.problem(data, torch.from_numpy(data.frequency)).weighing(weights),
            identity(data.num_classes),
            tolerance=self.tolerance,
            max_evaluations=self.max_iter or EXACT_PASSES,
        )

    def _train(self, data: FitData, weights: Tensor) -> Solution:
        """The paper's stage two, with class weights (K,); warns if the gradient of the whole loss has hardly fallen."""
        problem, steps = self.problem(data, weights), self.max_iter or SGD_STEPS
        trained = train_affine(
            data,
            weights,
            steps=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            warmup=RELEASE_WARMUP if self.schedule == "release" else 0,
            weight_decay=self.ridge,
            centre=problem.centre,
            divide_by=self.divide_by,
            seed=self.seed,
        )
        points = (identity(data.num_classes), trained.x)
        first, last = (float(np.abs(problem.value_and_gradient(x)[1]).max()) for x in points)
        gradient = last / first if first > 0 else 0.0
        if gradient > HARDLY_FALLEN:
            warn(
                f"{steps:,} steps of SGD at lr {self.lr:g} were not enough for MARC: the gradient "
                f"of its loss is still {gradient:.0%} of that at the start, as when most batches lack the rarest class "
                '(solver="exact" has no such limit)'
            )
        return replace(trained, converged=gradient <= HARDLY_FALLEN, gradient=gradient)

    def _choose_gamma(self, data: FitData, validation: FitData | None) -> tuple[Solution, float]:
        """The gamma with the best balanced accuracy on held-out outputs, and the solution for it.

        Some gammas are compared, then those around the best of them; rough solutions are enough for that.
        """
        held_out = require_validation(validation, "gamma")
        path = _GammaPath(self, data, GAMMAS)
        scores: dict[float, float] = {}

        def compare(gammas: Sequence[float]) -> float:
            for gamma in gammas:
                omega, beta = np.split(path.solve(gamma, max(self.tolerance, ROUGH)).x, 2)
                scores[gamma] = balanced_accuracy(omega, beta * data.weight_norms, held_out)
            return best_setting(scores, PAPER_GAMMA)

        best = GAMMAS.index(compare(GAMMAS[::COARSE]))
        chosen = compare([g for g in GAMMAS[max(best - COARSE + 1, 0) : best + COARSE] if g not in scores])
        return path.solve(chosen, self.tolerance), chosen

    def fit_path(self, outputs: Outputs, gammas: Sequence[float] = GAMMAS) -> dict[float, MARC]:
        """A fitted MARC for each gamma, for about the price of five."""
        self.check_settings()
        data = with_margins(self._check(outputs))
        path = _GammaPath(self, data, gammas)
        order = sorted(set(gammas))
        first = len(order) // 5  # a small one; from there down, then up
        for gamma in order[first::-1] + order[first + 1 :]:
            path.solve(gamma, self.tolerance)
        fitted = {gamma: unfitted(self).set_params(gamma=gamma) for gamma in gammas}
        for gamma, method in fitted.items():
            method.classes_, method.n_features_in_ = data.classes, data.num_classes
            method._set_solution(path.solutions[gamma], gamma, data)
        return fitted


class _GammaPath:
    """Solutions for several gammas: each starts where the others lead to, with their curvature.

    Args:
        method: the settings of the solves.
        data: samples of the fit.
        gammas: that will be solved; one pass gives the largest entries of their first gradients.
    """

    def __init__(self, method: MARC, data: FitData, gammas: Sequence[float]) -> None:
        self.method, self.data = method, data
        self.solutions: dict[float, Solution] = {}
        self.problem = method.problem(data, torch.from_numpy(data.frequency))
        factors = np.stack([class_weights(data.class_counts, gamma) for gamma in gammas])
        largest = np.abs(self.problem.gradients(identity(data.num_classes), factors)).max(1)
        self.first = dict(zip(gammas, largest.tolist(), strict=True))

    def solve(self, gamma: float, tolerance: float) -> Solution:
        """The solution for one gamma."""
        if self.method.solver == "sgd":
            self.solutions[gamma] = self.method._solve(self.data, gamma)
            return self.solutions[gamma]
        start, settings = identity(self.data.num_classes), {}
        if self.solutions:
            nearest = min(self.solutions, key=lambda other: abs(other - gamma))
            start = interpolated({other: solution.ahead for other, solution in self.solutions.items()}, gamma)
            settings = {"first": self.first[gamma], "memory": self.solutions[nearest].memory}
        self.solutions[gamma] = minimise_positive(
            self.problem.weighing(class_weights(self.data.class_counts, gamma)),
            start,
            tolerance=tolerance,
            max_evaluations=self.method.max_iter or EXACT_PASSES,
            **settings,
        )
        return self.solutions[gamma]
