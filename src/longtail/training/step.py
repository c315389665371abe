"""One optimiser step: from batches to the loss, its gradient and new weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longtail.config import TrainConfig
from longtail.core.progress import Display
from longtail.data.loading import Batch
from longtail.distributed.world import World
from longtail.networks.objective import Objective, Progress
from longtail.training.checkpoint import TrainState
from longtail.training.plan import Plan


class TrainingStep(nn.Module):
    """Computes the loss of batches: the module that DistributedDataParallel wraps."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batches: list[Batch], progress: Progress) -> Tensor:
        return self.objective(self.model, batches, progress)


def take_step(
    step: nn.Module, state: TrainState, parts: list[list[Batch]], config: TrainConfig, plan: Plan, world: World
) -> Tensor:
    """One optimiser step over the parts of a batch; returns the mean loss."""
    seeds = np.random.SeedSequence((config.seed, state.step, world.rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(seeds[0]))
    progress = plan.progress(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = progress.lr * state.objective.rate(group["part"], progress)
    step.train()
    state.optimizer.zero_grad()
    total = torch.zeros((), device=world.device)
    for number, batches in enumerate(parts, 1):
        if isinstance(step, DistributedDataParallel):
            step.require_backward_grad_sync = number == len(parts)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = step(batches, progress) / len(parts)
        loss.backward()
        total += loss.detach()
    state.optimizer.step()
    state.step += 1
    return total


def new_optimizer(model: nn.Module, objective: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """SGD over the parts of the network, each with a learning rate of its own."""
    return torch.optim.SGD(_parts(model, objective), config.lr, config.momentum, weight_decay=config.weight_decay)


def _parts(model: nn.Module, objective: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters by the part of the network they belong to, for the optimiser."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(name.split(".")[0], []).append(parameter)
    parts["objective"] = list(objective.parameters())
    return [{"params": parameters, "part": part} for part, parameters in parts.items() if parameters]


def compiled(model: nn.Module, images: Tensor, display: Display) -> nn.Module:
    """The compiled network, or the network itself if compilation fails."""
    try:
        # The trial runs on a copy, because it must not change batch-norm statistics.
        trial = torch.compile(copy.deepcopy(model))
        trial(images).sum().backward()
    except Exception as error:  # the compiler fails in many ways: none of them should end a training run
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        display.line(f"torch.compile does not work here, training continues without it: {reason}")
        return model
    return torch.compile(model)  # type: ignore[return-value]
