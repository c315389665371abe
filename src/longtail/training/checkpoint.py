"""Checkpoints: one safetensors file that holds enough to go on bit for bit.

Weights, what the objective has accumulated, and the optimiser's momentum; the step and the
configuration stand in the header. Random numbers need no state: they are a function of the seed
and the step. No pickle, so opening a checkpoint never runs code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longtail.core.formats import FORMAT, format_of
from longtail.core.tensors import read_tensors, write_tensors
from longtail.errors import UserError
from longtail.networks.objective import Objective

MOMENTUM = "momentum_buffer"


@dataclass
class TrainState:
    """Everything that changes while training."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.SGD
    step: int = 0

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters of network and objective by name."""
        both = nn.ModuleDict({"model": self.model, "objective": self.objective})
        return {name: value for name, value in both.named_parameters() if value.requires_grad}


def save_checkpoint(path: Path, state: TrainState, header: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    tensors = {f"model.{name}": value for name, value in state.model.state_dict().items()}
    tensors |= {f"objective.{name}": value for name, value in state.objective.state_dict().items()}
    for name, parameter in state.parameters().items():
        buffer = state.optimizer.state[parameter].get(MOMENTUM)
        if buffer is not None:
            tensors[f"momentum.{name}"] = buffer
    write_tensors(path, tensors, {"format": FORMAT, "step": state.step, **header})


def load_checkpoint(path: Path, state: TrainState) -> dict[str, Any]:
    """Restore a state in place; returns the header."""
    tensors, header = read_tensors(path)
    if format_of(header, path) == 0:
        raise UserError(f"{path} was written by an older longtail; finish the run with that version, or start it anew")
    for part, module in (("model", state.model), ("objective", state.objective)):
        prefix = f"{part}."
        module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    for name, parameter in state.parameters().items():
        stored = tensors.get(f"momentum.{name}")
        if stored is not None:
            # A copy into the parameter's own memory format keeps the optimiser step fast.
            state.optimizer.state[parameter][MOMENTUM] = torch.empty_like(parameter).detach().copy_(stored)
    state.step = int(header["step"])
    return header
