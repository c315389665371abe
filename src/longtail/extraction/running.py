"""Runs any model and restores its modes, its device and the random states afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from longtail.backbones.inference import evaluating
from longtail.core.random_state import random_state_kept
from longtail.distributed.presence import group_of_caller, taking_part
from longtail.distributed.world import World, find_device
from longtail.errors import UserError
from longtail.networks.head import hash_of, unwrap
from longtail.networks.head_search import uncompiled
from longtail.networks.sharded import runs_together


@dataclass(frozen=True)
class Running:
    """A model while it is run.

    Args:
        model: without its wrappers, in evaluation mode.
        device: where its inputs go.
        home: where the model was before; None if it was not moved.
        modes: which parts of it were in training mode before.
        world: processes that share the work.
    """

    model: nn.Module
    device: torch.device
    home: torch.device | None
    modes: dict[str, bool]
    world: World

    def restored(self, copy: nn.Module) -> nn.Module:
        """A copy of the model in the modes and on the device of the model before."""
        inside = dict(copy.named_modules(remove_duplicate=False))
        for path, mode in self.modes.items():  # from the outside in
            if path in inside:
                inside[path].train(mode)
        return copy if self.home is None else copy.to(self.home)


@contextmanager
def running(model: nn.Module, device: str = "auto", *, shards: int = 1, alone: bool = False) -> Iterator[Running]:
    """Prepares a model to be run, and restores its state at the end.

    Args:
        model: any module; wrapped or compiled ones too.
        device: where to run: auto, cpu, cuda, …
        shards: number of processes that the samples are divided among.
        alone: whether each process works for itself.
    """
    inner = unwrap(model)
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise UserError(
            f"{type(inner).__name__} has parameters without numbers (device meta); load its weights before calibrating"
        )
    target, home = _devices(inner, device)
    modes = {path: module.training for path, module in inner.named_modules(remove_duplicate=False)}
    world = World(0, 1, target) if alone and not runs_together(inner) else group_of_caller(target)
    if shards not in (1, world.size):
        raise UserError(
            f"the loader deals its samples out to {shards} processes, and there are {world.size} in the group; open "
            "the group first (torch.distributed.init_process_group), or leave the distributed sampler out"
        )
    needed = "each process shows a part of the samples" if shards > 1 else ""
    if runs_together(inner):
        needed = "the model is held in parts by all of them"
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        world = stack.enter_context(taking_part(world, needed=needed))
        for block in (placed(inner, target, home), evaluating(inner), uncompiled(), same_weights(inner, world)):
            stack.enter_context(block)
        yield Running(inner, target, home, modes, world)


def _devices(model: nn.Module, device: str) -> tuple[torch.device, torch.device | None]:
    """The device to run the model on, and its previous device if it has to be moved."""
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(places) > 1 or runs_together(model):
        return next(iter(model.parameters())).device, None  # a model on several devices stays there
    target = find_device(device)
    return target, next(iter(places), target)


@contextmanager
def placed(model: nn.Module, device: torch.device, home: torch.device | None) -> Iterator[None]:
    """Moves the model to a device while the block runs, then back."""
    if home is None:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


@contextmanager
def same_weights(model: nn.Module, world: World) -> Iterator[None]:
    """Buffers as process 0 has them while the block runs; an error where the parameters are not the same.

    DistributedDataParallel keeps parameters equal. Statistics of batch-norm are those of each process until the
    next training step; what is saved and served are those of process 0.
    """
    if world.size == 1 or runs_together(model):
        yield
        return
    alike = world.gather((hash_of(model.named_parameters()), hash_of(model.named_buffers())))
    others = [rank for rank, (own, _) in enumerate(alike) if own != alike[0][0]]
    if others:
        raise UserError(
            f"process {others[0]} holds a model with other weights than process 0; load the same everywhere"
        )
    buffers = list(model.buffers()) if len({digest for _, digest in alike}) > 1 else []
    before = [buffer.clone() for buffer in buffers]
    world.broadcast(buffers)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
