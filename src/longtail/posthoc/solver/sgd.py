"""SGD for methods that are fitted by gradient steps on stored outputs.

Batches are drawn as in training (every sample once an epoch, by the seed), the optimiser is SGD
with momentum, the learning rate falls to 0 along a cosine. No network is run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.data.loading import Sampler
from longtail.errors import UserError
from longtail.posthoc.inputs import FitData
from longtail.posthoc.solver import Solution
from longtail.posthoc.solver.affine import SMALLEST_SCALE

MOMENTUM = 0.9


def train_parameters(
    parameters: Sequence[Tensor],
    loss: Callable[[Tensor], Tensor],
    labels: np.ndarray,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    warmup: int = 0,
    weight_decay: float = 0.0,
    sampler: str = "instance",
    seed: int = 0,
    project: Callable[[], object] = lambda: None,
) -> float:
    """Train parameters in place; `loss(rows)` is that of the samples drawn. Returns the last loss.

    With `warmup` the learning rate first rises from `lr` to twice that, over that many steps. `project` is called after
    each step and brings the parameters back to where they may be.
    """
    batches = Sampler(labels, sampler, seed=seed)
    # The steps of torch.optim.SGD, written out: its import also imports torch's compiler, as slow as a whole fit.
    speeds = [torch.zeros_like(parameter) for parameter in parameters]
    value = torch.zeros(())
    for step in range(steps):
        value = loss(torch.from_numpy(batches.batch(step, batch_size).indices))
        gradients = torch.autograd.grad(value, list(parameters))
        with torch.no_grad():
            for parameter, gradient, speed in zip(parameters, gradients, speeds, strict=True):
                speed.mul_(MOMENTUM).add_(gradient.add(parameter, alpha=weight_decay))
                parameter.sub_(speed, alpha=learning_rate(step, steps, lr, warmup))
            project()
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        raise UserError(f"training diverged at lr {lr:g}; choose a smaller one")
    return float(value.detach())


def learning_rate(step: int, steps: int, lr: float, warmup: int = 0) -> float:
    """Half a cosine from `lr` to 0; with a warm-up, from twice `lr` after a rise from `lr`.

    >>> [round(learning_rate(step, 10, 0.1, warmup=4), 3) for step in (0, 3, 4, 7, 9)]
    [0.125, 0.2, 0.2, 0.1, 0.013]
    """
    if step < warmup:
        return lr * (1 + (step + 1) / warmup)
    highest = 2 * lr if warmup else lr
    return highest * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2


def weighted_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor, divide_by: str) -> Tensor:
    """Cross-entropy weighted by class, divided by the batch size or by the sum of the weights."""
    if divide_by == "weights":
        return F.cross_entropy(logits, labels, class_weights)
    return F.cross_entropy(logits, labels, class_weights, reduction="sum") / len(labels)


def weight_decay_beside(decay: float, class_weights: Tensor, labels: Tensor, divide_by: str) -> float:
    """Weight decay times the mean weight of a sample, so that it is as strong beside the loss at any imbalance.

    A loss divided by the sum of its weights has a mean weight of 1.

    >>> weight_decay_beside(5e-4, torch.tensor([0.5, 1.5]), torch.tensor([0, 0, 0, 1]), "batch")
    0.000375
    """
    return decay if divide_by == "weights" else decay * float(class_weights[labels].double().mean())


def train_affine(
    data: FitData,
    class_weights: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    warmup: int,
    weight_decay: float,
    centre: np.ndarray,
    divide_by: str,
    seed: int,
) -> Solution:
    """The paper's stage two: omega and beta by SGD on stored logits."""
    began = time.perf_counter()
    weights, norms = class_weights.float(), torch.from_numpy(data.weight_norms).float()
    decay = weight_decay_beside(weight_decay, weights, data.labels, divide_by)
    pulled_to = torch.from_numpy(centre).float()
    x = torch.cat([torch.ones(data.num_classes), torch.zeros(data.num_classes)]).requires_grad_()

    def loss(rows: Tensor) -> Tensor:
        omega, beta = x.chunk(2)
        calibrated = data.rows.read(rows.numpy()) * omega + beta * norms
        ridge = 0.5 * decay * (x - pulled_to).square().sum()
        return weighted_cross_entropy(calibrated, data.labels[rows], weights, divide_by) + ridge

    value = train_parameters(
        [x],
        loss,
        data.labels.numpy(),
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        warmup=warmup,
        seed=seed,
        project=lambda: x[: data.num_classes].clamp_min_(SMALLEST_SCALE),
    )
    return Solution(x.detach().double().numpy(), value, True, steps, None, time.perf_counter() - began)
