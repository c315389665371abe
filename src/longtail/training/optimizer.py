"""What changes during training, and the optimiser that changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from longtail.config import TrainConfig
from longtail.networks.objective import Objective
from longtail.training.tuning import frozen_modules, layer_numbers


@dataclass
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    step: int = 0
    average: AveragedModel | None = None
    """Moving average of the weights (--ema), with the batch-norm statistics of the last step."""
    frozen: Sequence[nn.Module] = ()
    """Parts of the network that stay in evaluation mode."""
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    """Scales the loss for --precision fp16, whose small gradients would be 0."""

    @classmethod
    def new(cls, model: nn.Module, objective: Objective, config: TrainConfig) -> TrainState:
        """A state before the first step."""
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema)) if config.ema else None
        optimizer, device = new_optimizer(model, objective, config), next(model.parameters()).device
        scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        return cls(model, objective, optimizer, average=average, frozen=frozen_modules(model), scaler=scaler)

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
    groups = _parts(model, objective, config)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, config.momentum, weight_decay=config.weight_decay)
    split = [_decayed(group, config.weight_decay) for group in groups]
    return torch.optim.AdamW([group for pair in split for group in pair if group["params"]], config.lr)


def _parts(model: nn.Module, objective: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Trained parameters by the part of the network they belong to, and by the factor of their learning rate."""
    scales: dict[str, float] = {}
    if config.layer_decay < 1:
        count, layers = layer_numbers(model.get_submodule("backbone"))
        scales = {
            f"backbone.{name}": config.layer_decay ** (count + 1 - layer) for name, layer in layers.items() if count
        }
    parts: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts.setdefault((name.split(".")[0], scales.get(name, 1.0)), []).append(parameter)
    parts["objective", 1.0] = list(objective.parameters())
    return [{"params": values, "part": part, "scale": scale} for (part, scale), values in parts.items() if values]


def _decayed(group: dict[str, Any], weight_decay: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A group as two: weights, which decay, and biases and parameters of normalisation layers, which do not."""
    weights = [parameter for parameter in group["params"] if parameter.ndim > 1]
    others = [parameter for parameter in group["params"] if parameter.ndim <= 1]
    return (
        {**group, "params": weights, "weight_decay": weight_decay},
        {**group, "params": others, "weight_decay": 0.0},
    )
