"""Checkpoints: one safetensors file from which training continues bit for bit.

It holds the weights, the state of the objective and the momentum of the optimiser; the header holds the step and
the configuration. Random numbers need no state: they are a function of the seed and the step. There is no pickle,
so opening a checkpoint never runs code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from longtail.core.formats import FORMAT, format_of
from longtail.core.reading import reason
from longtail.core.records import as_record
from longtail.core.tensors import read_tensors, write_tensors
from longtail.errors import UserError
from longtail.networks.objective import Objective

MOMENTUM = "momentum_buffer"


@dataclass
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.SGD
    step: int = 0

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters of network and objective by name."""
        both = nn.ModuleDict({"model": self.model, "objective": self.objective})
        return {name: value for name, value in both.named_parameters() if value.requires_grad}


@dataclass(frozen=True)
class CheckpointHeader:
    """The header: the step, the number of processes, and the loss since the last record.

    `momentum` lists the parameters that have a momentum, so that a missing one is detected; older checkpoints have
    no list.
    """

    step: int
    processes: int
    loss_sums: list[float]
    loss_steps: int
    momentum: list[str] | None = None


def save_checkpoint(path: Path, state: TrainState, *, loss_sums: list[float], loss_steps: int) -> None:
    """Write a checkpoint atomically; `loss_sums` has one number per process."""
    tensors = {f"model.{name}": value for name, value in state.model.state_dict().items()}
    tensors |= {f"objective.{name}": value for name, value in state.objective.state_dict().items()}
    momentum = {name: state.optimizer.state[value].get(MOMENTUM) for name, value in state.parameters().items()}
    momentum = {name: buffer for name, buffer in momentum.items() if buffer is not None}
    tensors |= {f"momentum.{name}": buffer for name, buffer in momentum.items()}
    header = CheckpointHeader(state.step, len(loss_sums), loss_sums, loss_steps, list(momentum))
    write_tensors(path, tensors, {"format": FORMAT, **asdict(header)})


def load_checkpoint(path: Path, state: TrainState, *, steps: int) -> CheckpointHeader:
    """Restore the state of a run in place; raises if the checkpoint does not belong to this run."""
    tensors, details = read_tensors(path)
    if format_of(details, path) == 0:
        raise UserError(f"{path} was written by an older longtail; finish the run with that version, or start it again")
    header = as_record(CheckpointHeader, details, path)
    _require(0 <= header.step <= steps, f"step {header.step} of {steps}", path)
    _require(header.processes == len(header.loss_sums) and header.loss_steps >= 0, "its sums of the loss", path)
    for part, module in (("model", state.model), ("objective", state.objective)):
        try:
            module.load_state_dict(_below(f"{part}.", tensors))
        except RuntimeError as error:
            raise UserError(f"{path} does not fit the network of its run: {reason(error)}") from error
    momentum, parameters = _below("momentum.", tensors), state.parameters()
    _require(header.momentum is None or set(header.momentum) == momentum.keys(), "its momentum is not whole", path)
    for name, stored in momentum.items():
        _require(name in parameters and stored.shape == parameters[name].shape, f"the momentum of {name}", path)
        # A copy into the parameter's own memory format keeps the optimiser step fast.
        own = torch.empty_like(parameters[name]).detach().copy_(stored)
        state.optimizer.state[parameters[name]][MOMENTUM] = own
    state.step = header.step
    return header


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _require(sound: bool, what: str, path: Path) -> None:
    if not sound:
        raise UserError(f"{path} is damaged: {what} cannot be right; delete it to start the run again")
