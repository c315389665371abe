"""What changes during training, the optimiser that changes it, and checkpoints of both.

A checkpoint is one safetensors file from which training continues bit for bit. It holds the weights and their average,
the state of the objective and that of the optimiser; the header holds the step. Random numbers need no state: they are
a function of the seed and the step. There is no pickle, so opening a checkpoint never runs code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from longtail.config import TrainConfig
from longtail.errors import UserError
from longtail.files.reading import reason
from longtail.files.records import FORMAT, as_record, format_of
from longtail.files.tensors import read_tensors, write_tensors
from longtail.networks.objective import Objective
from longtail.training.tuning import frozen_modules, layer_numbers

# Entries of an optimiser's state for a parameter, and their prefix in the file.
ENTRIES = {"momentum_buffer": "momentum", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "adam_step"}


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
    """Modules of the network that stay in evaluation mode."""
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

    def modules(self) -> dict[str, nn.Module]:
        """The modules whose tensors are saved, by their prefix in a checkpoint."""
        modules = {"model": self.model, "objective": self.objective, "average": self.average}
        return {name: module for name, module in modules.items() if module is not None}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters of network and objective by name."""
        both = nn.ModuleDict({"model": self.model, "objective": self.objective})
        return {name: value for name, value in both.named_parameters() if value.requires_grad}


def new_optimizer(model: nn.Module, objective: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser of the trained parameters.

    They are grouped by the attribute of the network that holds them and by the factor of their learning rate. AdamW
    does not decay biases and parameters of normalisation layers.
    """
    scales: dict[str, float] = {}
    if config.layer_decay < 1:
        count, layers = layer_numbers(model.get_submodule("backbone"))
        scales = {
            f"backbone.{name}": config.layer_decay ** (count + 1 - layer) for name, layer in layers.items() if count
        }
    members: dict[tuple[str, float, float], list[nn.Parameter]] = defaultdict(list)
    parameters = [*model.named_parameters(), *objective.named_parameters("objective")]
    for name, value in parameters:
        if value.requires_grad:
            decay = config.weight_decay if config.optimizer == "sgd" or value.ndim > 1 else 0.0
            members[name.split(".")[0], scales.get(name, 1.0), decay].append(value)
    groups: list[dict[str, Any]] = [
        {"params": values, "part": part, "scale": scale, "weight_decay": decay}
        for (part, scale, decay), values in members.items()
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, config.momentum)
    return torch.optim.AdamW(groups, config.lr)


@dataclass(frozen=True)
class CheckpointHeader:
    """The header: the step, the number of processes, and the loss since the last record.

    `momentum` lists the parameters that the optimiser has a state for, so that a missing one is detected; older
    checkpoints have no list. `scaler` is the state of the loss scale of --precision fp16.
    """

    step: int
    processes: int
    loss_sums: list[float]
    loss_steps: int
    momentum: list[str] | None = None
    scaler: dict[str, float] = field(default_factory=dict)


def save_checkpoint(path: Path, state: TrainState, *, loss_sums: list[float], loss_steps: int) -> None:
    """Write a checkpoint atomically; `loss_sums` has one number per process."""
    tensors = {
        f"{prefix}.{name}": value
        for prefix, module in state.modules().items()
        for name, value in module.state_dict().items()
    }
    with_state = []
    for name, parameter in state.parameters().items():
        entries = {key: value for key, value in state.optimizer.state[parameter].items() if value is not None}
        tensors |= {f"{ENTRIES[key]}.{name}": value for key, value in entries.items()}
        with_state += [name] if entries else []
    header = CheckpointHeader(state.step, len(loss_sums), loss_sums, loss_steps, with_state, state.scaler.state_dict())
    write_tensors(path, tensors, {"format": FORMAT, **asdict(header)})


def load_checkpoint(path: Path, state: TrainState, *, steps: int) -> CheckpointHeader:
    """Restore the state of a run in place; raises if the checkpoint does not belong to this run."""
    tensors, details = read_tensors(path)
    if format_of(details, path) == 0:
        raise UserError(f"{path} was written by an older longtail; finish the run with that version, or start it again")
    header = as_record(CheckpointHeader, details, path)
    _require(0 <= header.step <= steps, f"step {header.step} of {steps}", path)
    _require(header.processes == len(header.loss_sums) and header.loss_steps >= 0, "its sums of the loss", path)
    for prefix, module in state.modules().items():
        try:
            module.load_state_dict(_below(f"{prefix}.", tensors))
        except RuntimeError as error:
            raise UserError(f"{path} does not fit the network of its run: {reason(error)}") from error
    parameters = state.parameters()
    adam = isinstance(state.optimizer, torch.optim.AdamW)
    for key in ("exp_avg", "exp_avg_sq", "step") if adam else ("momentum_buffer",):
        stored = _below(f"{ENTRIES[key]}.", tensors)
        whole = header.momentum is None or set(header.momentum) == stored.keys()
        _require(whole, "its state of the optimiser is not whole", path)
        for name, value in stored.items():
            expected = () if key == "step" else parameters[name].shape if name in parameters else None
            _require(name in parameters and value.shape == expected, f"the state of the optimiser for {name}", path)
            # A copy in the memory format of the parameter keeps the optimiser step fast.
            like = value if key == "step" else parameters[name]
            state.optimizer.state[parameters[name]][key] = torch.empty_like(like).detach().copy_(value)
    _require(header.scaler.keys() == state.scaler.state_dict().keys(), "its scale of the loss", path)
    if header.scaler:
        state.scaler.load_state_dict(header.scaler)
    state.step = header.step
    return header


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _require(sound: bool, what: str, path: Path) -> None:
    if not sound:
        raise UserError(f"{path} is damaged: {what} cannot be right; delete it to start the run again")
