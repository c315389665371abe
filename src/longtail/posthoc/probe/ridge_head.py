"""A linear head by ridge-penalised cross-entropy with natural class weights.

    minimise  mean_i CE(W (x_i - g) + b, y_i) + sum_k ridge_k / 2 w_k M w_k' + 0.05 / N |b - log pi|^2   over W, b

The minimiser is L-BFGS in the coordinates of `metric`, scaled by the diagonal of the
curvature: class k and coordinate j have about mean_i p_ik (1 - p_ik) E_j + ridge_k. Head and tail classes then
converge at the same rate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from longtail.posthoc.probe.inputs import Rows
from longtail.posthoc.probe.metric import Coordinates

BIAS_PRECISION = 0.1  # b ~ N(log pi, 10): a small class among very many samples may be far from its prior
HISTORY = 6
FEWEST_STEPS = 6
SOLVED = 1e-2
SMALLEST_CURVATURE = 1e-10
ENOUGH_DECREASE = 1e-4
SHORTEST_STEP = 1e-4


@dataclass
class Head:
    """A head in coordinates: V (K, D), bias (K,), and mean p (1 - p) of each class (K,) on its samples."""

    coordinates: Tensor
    bias: Tensor
    spread: Tensor

    @classmethod
    def start(cls, prior: Tensor, width: int) -> Head:
        """The head that predicts a prior (K,) for every sample."""
        return cls(prior.new_zeros(len(prior), width), prior.log(), prior * (1 - prior))


class RidgeProblem:
    """The objective on some rows.

    Args:
        rows: features (N, D).
        labels: (N,) int64, at least one of every class.
        num_classes: K.
        system: coordinates V.
    """

    def __init__(self, rows: Rows, labels: Tensor, num_classes: int, system: Coordinates) -> None:
        self.rows = rows
        self.labels = labels
        self.system = system
        self.passes = 0
        self.converged = True
        self.counts = torch.bincount(labels, minlength=num_classes).double()
        self.prior = (self.counts / len(labels)).to(rows.dtype)
        self.bias_ridge = BIAS_PRECISION / len(labels)

    def value_and_gradient(self, vector: Tensor, ridge: Tensor) -> tuple[float, Tensor, Tensor]:
        """Objective, gradient (K, D + 1) and spread (K,) at [V, b] (K, D + 1), for the ridge (K, 1) of each class."""
        self.passes += 1
        coordinates, bias = vector[:, :-1], vector[:, -1].contiguous()
        weight = self.system.weight(coordinates)
        total = torch.zeros_like(weight)
        small = torch.zeros(1 + 2 * len(bias), dtype=torch.float64)  # one exchange between processes, beside `total`
        loss, (sums, squares) = small[:1], small[1:].view(2, -1)
        for where, chunk in self.rows.chunks(weight, self.system.centre, shared=True):
            own = self.labels[where].unsqueeze(1)
            scores = chunk.scores(bias)
            scores -= scores.amax(1, keepdim=True)
            picked = scores.gather(1, own).squeeze(1).double()
            shares = scores.exp_()
            norm = shares.sum(1, keepdim=True)
            loss += (norm.squeeze(1).double().log() - picked).sum()
            shares /= norm
            squares += torch.linalg.vector_norm(shares, dim=0).double().square()
            shares.scatter_add_(1, own, torch.full_like(own, -1, dtype=shares.dtype))
            sums += shares.sum(0).double()
            total += chunk.gradient(shares)
        self.rows.world.sum(small), self.rows.world.sum(total)
        number = len(self.labels)
        spread = ((sums + self.counts - squares) / number).clamp(min=SMALLEST_CURVATURE).to(bias)
        pull = ridge * coordinates
        penalty = float((pull * coordinates).sum(dtype=torch.float64))
        away = bias - self.prior.log()
        penalty += self.bias_ridge * float(away.square().sum(dtype=torch.float64))
        gradient = torch.empty_like(vector)
        gradient[:, :-1] = self.system.gradient(total).div_(number).add_(pull)
        gradient[:, -1] = (sums / number).to(bias) + self.bias_ridge * away
        return float(loss) / number + penalty / 2, gradient, spread

    def solve(self, head: Head, ridge: Tensor, tolerance: float, most: int = 200) -> Head:
        """The optimum for the ridge (K, 1) of each class, from a head nearby.

        It ends when the scaled gradient is below `tolerance` times the root of the objective, which is then higher than
        its minimum by about half of `tolerance` squared, relatively; `converged` is False after `most` steps without.
        """
        self.converged = True
        curvature = torch.cat([self.system.curvature, self.system.curvature.new_ones(1)])
        scale = torch.outer(head.spread, curvature)
        scale[:, :-1] += ridge
        scale[:, -1] += self.bias_ridge
        scale.rsqrt_()
        point = torch.cat([head.coordinates, head.bias.unsqueeze(1)], 1)
        value, gradient, spread = self.value_and_gradient(point, ridge)
        gradient *= scale
        memory: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY)
        for done in range(most):
            # From a head nearby the gradient may be small at once: the first steps are made all the same.
            end = tolerance * math.sqrt(value)
            if float(gradient.norm()) <= (end if done >= FEWEST_STEPS else SOLVED * end):
                break
            step = _direction(gradient, memory)
            slope = float((step.double() * gradient).sum())
            length, moved = 1.0, None
            while moved is None and length > SHORTEST_STEP:
                trial = torch.addcmul(point, step, scale, value=length)
                reached, slopes, spread = self.value_and_gradient(trial, ridge)
                if reached <= value + ENOUGH_DECREASE * length * slope:
                    moved = trial
                else:
                    length *= min(max(-slope * length / (2 * (reached - value - slope * length)), 0.1), 0.5)
            if moved is None:  # rounding: no step lowers the objective
                break
            slopes *= scale
            change = slopes - gradient
            product = float((change.double() * step).sum()) * length
            if product > 0:
                memory.append((step.mul_(length), change, product))
            point, value, gradient = moved, reached, slopes
        else:
            self.converged = False
        return Head(point[:, :-1], point[:, -1].contiguous(), spread)


def _direction(gradient: Tensor, memory: deque[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The direction of L-BFGS."""
    direction = -gradient
    factors = []
    for step, change, product in reversed(memory):
        factors.append(float((step * direction).sum()) / product)
        direction.add_(change, alpha=-factors[-1])
    if memory:
        _, change, product = memory[-1]
        direction *= product / float(change.double().square().sum())
    for (step, change, product), factor in zip(memory, reversed(factors), strict=True):
        direction.add_(step, alpha=factor - float((change * direction).sum()) / product)
    return direction
