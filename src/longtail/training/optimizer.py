"""What changes during training, and the optimiser that changes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from longtail.config import TrainConfig
from longtail.networks.objective import Objective


@dataclass
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    step: int = 0
    average: AveragedModel | None = None
    """Moving average of the weights (--ema), with the batch-norm statistics of the last step."""

    @classmethod
    def new(cls, model: nn.Module, objective: Objective, config: TrainConfig) -> TrainState:
        """A state before the first step."""
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema)) if config.ema else None
        return cls(model, objective, new_optimizer(model, objective, config), average=average)

    @property
    def result(self) -> nn.Module:
        """The network that is evaluated and saved: the averaged one, if there is an average."""
        return self.model if self.average is None else self.average.module

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters of network and objective by name."""
        both = nn.ModuleDict({"model": self.model, "objective": self.objective})
        return {name: value for name, value in both.named_parameters() if value.requires_grad}


def new_optimizer(model: nn.Module, objective: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser over the parts of the network, each with a learning rate of its own."""
    groups = _parts(model, objective)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, config.momentum, weight_decay=config.weight_decay)
    split = [_decayed(group, config.weight_decay) for group in groups]
    return torch.optim.AdamW([group for pair in split for group in pair if group["params"]], config.lr)


def _parts(model: nn.Module, objective: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters by the part of the network they belong to, for the optimiser."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(name.split(".")[0], []).append(parameter)
    parts["objective"] = list(objective.parameters())
    return [{"params": parameters, "part": part} for part, parameters in parts.items() if parameters]


def _decayed(group: dict[str, Any], weight_decay: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A group as two: weights, which decay, and biases and parameters of normalisation layers, which do not."""
    weights = [parameter for parameter in group["params"] if parameter.ndim > 1]
    others = [parameter for parameter in group["params"] if parameter.ndim <= 1]
    return (
        {**group, "params": weights, "weight_decay": weight_decay},
        {**group, "params": others, "weight_decay": 0.0},
    )
