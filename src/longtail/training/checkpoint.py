"""Checkpoints: one safetensors file from which training continues bit for bit.

It holds the weights and their average, the state of the objective and that of the optimiser; the header holds the
step. Random numbers need no state: they are a function of the seed and the step. There is no pickle, so opening a
checkpoint never runs code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.files.reading import reason
from longtail.files.records import FORMAT, as_record, format_of
from longtail.files.tensors import read_tensors, write_tensors
from longtail.training.optimizer import TrainState

# Entries of an optimiser's state for a parameter, and their prefix in the file.
ENTRIES = {"momentum_buffer": "momentum", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "adam_step"}


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
        f"{part}.{name}": value
        for part, module in _modules(state).items()
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
    for part, module in _modules(state).items():
        try:
            module.load_state_dict(_below(f"{part}.", tensors))
        except RuntimeError as error:
            raise UserError(f"{path} does not fit the network of its run: {reason(error)}") from error
    _load_optimizer(tensors, header, state, path)
    _require(header.scaler.keys() == state.scaler.state_dict().keys(), "its scale of the loss", path)
    if header.scaler:
        state.scaler.load_state_dict(header.scaler)
    state.step = header.step
    return header


def _load_optimizer(tensors: dict[str, Tensor], header: CheckpointHeader, state: TrainState, path: Path) -> None:
    parameters = state.parameters()
    adam = isinstance(state.optimizer, torch.optim.AdamW)
    for key in ("exp_avg", "exp_avg_sq", "step") if adam else ("momentum_buffer",):
        stored = _below(f"{ENTRIES[key]}.", tensors)
        whole = header.momentum is None or set(header.momentum) == stored.keys()
        _require(whole, "its state of the optimiser is not whole", path)
        for name, value in stored.items():
            expected = () if key == "step" else parameters[name].shape if name in parameters else None
            _require(name in parameters and value.shape == expected, f"the state of the optimiser for {name}", path)
            # A copy into the parameter's own memory format keeps the optimiser step fast.
            like = value if key == "step" else parameters[name]
            state.optimizer.state[parameters[name]][key] = torch.empty_like(like).detach().copy_(value)


def _modules(state: TrainState) -> dict[str, nn.Module]:
    """The modules whose tensors are saved, by their prefix in the file."""
    modules = {"model": state.model, "objective": state.objective, "average": state.average}
    return {part: module for part, module in modules.items() if module is not None}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _require(sound: bool, what: str, path: Path) -> None:
    if not sound:
        raise UserError(f"{path} is damaged: {what} cannot be right; delete it to start the run again")
