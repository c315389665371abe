"""cRT: train a new linear head on the frozen features, as if all classes were equally frequent.

Multinomial logistic regression on the frozen features, cross-entropy under class-balanced
sampling. On stored features that expectation is a weighted sum in which every class weighs the
same, and the problem is convex: `exact` solves it to its optimum, `sgd` trains as the authors do.

Paper: Kang et al., Decoupling Representation and Classifier for Long-Tailed Recognition, ICLR 2020.
"""

from __future__ import annotations

import math
import time
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.errors import choose
from longtail.outputs.checks import Array
from longtail.posthoc.affine import check_numbers
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import FitData, require_features
from longtail.posthoc.solver import FitResult, minimise
from longtail.posthoc.solver.linear import (
    SINGLE_PRECISION,
    LinearProblem,
    balanced_weights,
    class_statistics,
    plain_penalty,
)
from longtail.posthoc.solver.sgd import train_parameters


class NewHead(PostHoc):
    """A linear head on the features that replaces the model's own.

    Fitted attributes: `weight_` (K, D), `bias_` (K,), `result_`.
    """

    needs_features = True
    weight_: np.ndarray
    bias_: np.ndarray

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        inputs = torch.as_tensor(require_features(features, self, self.weight_.shape[1]))
        weight, bias = (torch.as_tensor(v).to(inputs) for v in (self.weight_, self.bias_))
        return F.linear(inputs, weight, bias)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(self.weight_).to(weight), torch.as_tensor(self.bias_).to(weight)

    @property
    def n_parameters_(self) -> int:
        return self.weight_.size + self.bias_.size


class CRT(NewHead):
    """Classifier re-training; needs features.

    Args:
        solver: "exact" solves the convex problem; "sgd" trains with class-balanced batches from a random start.
        ridge: weight decay.
        tolerance: exact: largest entry of the gradient at the end, relative to the start.
        max_iter: passes over the data (exact; default 1,000) or steps (sgd; default 2,000).
        batch_size: sgd: samples per step.
        lr: sgd: learning rate at the start; falls to 0 along a cosine.
        seed: sgd: random seed of the batches and the first weights.

    Fitted attributes: `weight_` (K, D), `bias_` (K,), `result_`.
    """

    stage_two: ClassVar[dict[str, str]] = {"ridge": "weight_decay", "batch_size": "batch_size", "max_iter": "steps"}

    def __init__(
        self,
        solver: Literal["exact", "sgd"] = "exact",
        *,
        ridge: float = 5e-4,
        tolerance: float = 1e-4,
        max_iter: int | None = None,
        batch_size: int = 512,
        lr: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.solver = solver
        self.ridge = ridge
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.lr = lr
        self.seed = seed

    def check_settings(self) -> None:
        choose("solver", self.solver, ("exact", "sgd"))
        check_numbers(self)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        features = require_features(data.features, self)
        if self.solver == "sgd":
            self._train(data, features)
            return
        statistics = class_statistics(features, data.labels, data.num_classes, data.world)
        problem = LinearProblem(
            features,
            data.labels,
            balanced_weights(data.labels, data.num_classes),
            statistics,
            plain_penalty(self.ridge, statistics),
            exact=self.tolerance < SINGLE_PRECISION,
            world=data.world,
        )
        passes = 1000 if self.max_iter is None else self.max_iter
        solution = minimise(problem, problem.start, tolerance=self.tolerance, max_evaluations=passes)
        head = problem.head(solution.x)
        self.weight_, self.bias_ = head.weight, head.bias
        self.result_ = FitResult.of(solution)

    def _train(self, data: FitData, features: Array) -> None:
        began = time.perf_counter()
        inputs = torch.as_tensor(np.asarray(features)).float()
        bound = 1 / math.sqrt(inputs.shape[1])
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.empty(data.num_classes, inputs.shape[1]).uniform_(-bound, bound, generator=generator)
        weight, bias = weight.requires_grad_(), torch.zeros(data.num_classes, requires_grad=True)
        steps = 2000 if self.max_iter is None else self.max_iter
        value = train_parameters(
            [weight, bias],
            lambda rows: F.cross_entropy(F.linear(inputs[rows], weight, bias), data.labels[rows]),
            data.labels.numpy(),
            steps=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=self.ridge,
            sampler="class-balanced",
            seed=self.seed,
        )
        self.weight_, self.bias_ = weight.detach().numpy(), bias.detach().numpy()
        self.result_ = FitResult(True, steps, None, time.perf_counter() - began, value)
