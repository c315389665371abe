"""Stage-one training: the loop, its evaluations and its checkpoints.

Every number of a step (which images, how augmented, what is dropped at random, which learning
rate) is computed from the seed and the step. A run that was interrupted therefore goes on bit for
bit from its last checkpoint.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longtail.backbones.weights import load_backbone
from longtail.config import TrainConfig, comparable
from longtail.core.progress import QUIET, Display
from longtail.data.loading import Batch, load, resident
from longtail.data.open import open_splits
from longtail.data.samplers import Draw, Sampler
from longtail.distributed.world import World, join
from longtail.errors import UserError, choose
from longtail.methods import TRAIN_METHODS
from longtail.metrics.scores import Metrics
from longtail.networks.objective import Objective, Progress
from longtail.recipes import find_recipe, with_authors_settings
from longtail.runs.network import build_network, image_channels, transforms
from longtail.runs.score import score
from longtail.training.checkpoint import TrainState
from longtail.training.journal import Journal
from longtail.training.plan import Plan
from longtail.training.stop import StopRequest
from longtail.training.trackers import Tracker

NOTE_EVERY = 20  # steps between looks at the loss, each of which waits for the device


class Interrupted(Exception):
    """Training was asked to stop, and its checkpoint is written."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class TrainingStep(nn.Module):
    """From batches to the loss: the unit that is distributed."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batches: list[Batch], progress: Progress) -> Tensor:
        return self.objective(self.model, batches, progress)


class Trainer:
    """One training run in one folder.

    Args:
        config: what to train.
        folder: where the run is written.
        world: this process among those that train together.
        display: where progress is shown.
        resume: go on from the folder's checkpoint instead of starting.
        trackers: names or objects that the numbers also go to.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        world: World,
        display: Display,
        *,
        resume: bool = False,
        trackers: Sequence[str | Tracker] = (),
    ) -> None:
        self.config = config
        self.world = world
        self.display = display if world.is_main else QUIET
        self.method = TRAIN_METHODS[choose("method", config.method, TRAIN_METHODS)]
        self.splits = open_splits(config)
        world.require_alike(**comparable(config), resume=resume, images=self.splits.train.digest)
        self.samplers = self._samplers()
        # One augmenting transform per stream: streams of one sampler show the same images differently.
        self.transforms = [transforms(config, self.splits, stream)[0] for stream in range(len(self.samplers))]
        self.state = self._new_state()
        streams, stages = len(self.samplers), self.state.objective.stages
        self.plan = Plan.of(config, len(self.splits.train), streams=streams, stages=stages)
        self.journal = Journal(folder, config, self.splits, world, trackers)
        self.journal.begin(self.state, resume=resume)

    def _samplers(self) -> list[Sampler]:
        names = self.method.samplers
        if self.config.sampler is not None:
            if len(names) > 1:
                raise UserError(f"{self.config.method} has its own samplers ({', '.join(names)}); leave out --sampler")
            names = (self.config.sampler,)
        if self.config.batch_size % (self.config.accumulate * self.world.size):
            raise UserError(
                f"--batch-size {self.config.batch_size} does not divide into {self.config.accumulate} parts x "
                f"{self.world.size} processes"
            )
        labels = self.splits.train.labels.numpy()
        epochs = Plan.of(self.config, len(labels)).progress(0).epochs
        return [Sampler(labels, name, seed=self.config.seed, epochs=epochs) for name in names]

    def _new_state(self) -> TrainState:
        config, counts = self.config, self.splits.train.class_counts
        torch.manual_seed(config.seed)
        model, objective = build_network(config, counts, image_channels(self.splits))
        if config.weights:
            load_backbone(model.get_submodule("backbone"), Path(config.weights))
        model = model.to(self.world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        objective = objective.to(self.world.device)
        groups = _parts(model, objective)
        optimizer = torch.optim.SGD(groups, config.lr, config.momentum, weight_decay=config.weight_decay)
        return TrainState(model, objective, optimizer)

    def run(self) -> Metrics | None:
        """Train to the end; returns the last validation metrics, None without a validation split."""
        if self.journal.finished:
            self.display.line(f"{self.journal.folder} is finished already")
            return None
        try:
            return self._train()
        finally:
            self.journal.close()

    def _train(self) -> Metrics | None:
        metrics = None
        step = TrainingStep(self._network(), self.state.objective)
        distributed = DistributedDataParallel(step) if self.world.size > 1 else step
        total, done = self.plan.images_at(self.plan.steps), self.plan.images_at(self.state.step)
        with StopRequest() as stop, self.display.task("training", total, done=done) as task:
            for batches in self._batches():
                self.journal.add(self._step(distributed, batches))
                task.advance(self.plan.images_at(1), self._note())
                last = self.state.step - 1
                if self.plan.due(last, self.config.evaluate_every):
                    loss = self.journal.mean_loss()  # first, because it stops a run that has diverged
                    metrics = self._evaluate()
                    self.display.line(self.journal.record(self.plan, self.state, loss, metrics, task.speed))
                if self.plan.due(last, self.config.checkpoint_every):
                    self.journal.save(self.state)
                if stop.requested(self.world) and self.state.step < self.plan.steps:
                    self.journal.save(self.state)
                    raise Interrupted(self.state.step)
        self.journal.finish(self.state)
        return metrics

    def _note(self) -> str:
        if self.state.step % NOTE_EVERY:
            return ""
        return f"epoch {self.plan.epoch(self.state.step)}  loss {self.journal.mean_loss():.3f}"

    def _network(self) -> nn.Module:
        """The network as the steps run it: compiled if asked and possible."""
        if not self.config.compile:
            return self.state.model
        try:
            # The trial runs on a copy: it must not move batch-norm statistics.
            trial = torch.compile(copy.deepcopy(self.state.model))
            trial(next(self._streams()[0]).images).sum().backward()
        except Exception as error:  # the compiler fails in many ways: none of them should end a training run
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.display.line(f"torch.compile does not work here, going on without it: {reason}")
            return self.state.model
        return torch.compile(self.state.model)  # type: ignore[return-value]

    def _step(self, step: nn.Module, parts: list[list[Batch]]) -> Tensor:
        """One optimiser step over the parts of a batch; returns the mean loss."""
        state, config = self.state, self.config
        seeds = np.random.SeedSequence((config.seed, state.step, self.world.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(seeds[0]))
        progress = self.plan.progress(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = progress.lr * state.objective.rate(group["part"], progress)
        step.train()
        state.optimizer.zero_grad()
        total = torch.zeros((), device=self.world.device)
        for number, batches in enumerate(parts, 1):
            if isinstance(step, DistributedDataParallel):
                step.require_backward_grad_sync = number == len(parts)
            with torch.autocast(self.world.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                loss = step(batches, progress) / len(parts)
            loss.backward()
            total += loss.detach()
        state.optimizer.step()
        state.step += 1
        return total

    def _batches(self) -> Iterator[list[list[Batch]]]:
        """For each step left: for each part of the batch, one batch per stream."""
        streams = self._streams()
        for _ in range(self.state.step, self.plan.steps):
            yield [[next(stream) for stream in streams] for _ in range(self.config.accumulate)]

    def _streams(self) -> list[Iterator[Batch]]:
        images = resident(self.splits.train, self.world.device)
        workers, device = self.config.workers, self.world.device
        return [
            load(images, transform, self._draws(sampler), workers=workers, device=device)
            for transform, sampler in zip(self.transforms, self.samplers, strict=True)
        ]

    def _draws(self, sampler: Sampler) -> Iterator[Draw]:
        """This process's draws of one stream, part by part, from the current step on."""
        parts = self.config.accumulate
        size = self.config.batch_size // parts
        for number in range(self.state.step * parts, self.plan.steps * parts):
            yield sampler.batch(number, size, self.world.rank, self.world.size)

    def _evaluate(self) -> Metrics | None:
        images = self.splits.validation
        if images is None:
            return None
        clean = transforms(self.config, self.splits)[1]
        model = self.state.model
        # Batch-norm statistics are those of rank 0, which are saved, in all parts of the result.
        self.world.broadcast(model.buffers())
        counts = self.splits.group_counts.numpy()
        return score(model, images, clean, self.world, counts, workers=self.config.workers)


def _parts(model: nn.Module, objective: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters by the part of the network they belong to, for the optimiser."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(name.split(".")[0], []).append(parameter)
    parts["objective"] = list(objective.parameters())
    return [{"params": parameters, "part": part} for part, parameters in parts.items() if parameters]


def train(
    config: TrainConfig | str,
    out: Path | str,
    *,
    resume: bool = False,
    download: bool = False,
    trackers: Sequence[str | Tracker] = (),
    display: Display = QUIET,
) -> Metrics | None:
    """Train a network as `config` says, or the recipe of that name, and leave a run in folder `out`.

    Returns the validation metrics after the last step, None without a validation split. Works in one
    process or in those that `torchrun` started. The caller's random numbers stay as they are.

    Args:
        config: what to train, or the name of a recipe.
        out: folder of the run.
        resume: go on from the checkpoint in the folder, bit for bit.
        download: fetch CIFAR first if it is not there.
        trackers: where the numbers of each evaluation also go: tensorboard, mlflow, csv, or objects with the
            methods of `longtail.training.trackers.Tracker`.
        display: where progress is shown.
    """
    config = with_authors_settings(find_recipe(config))
    if config.data == "places-lt" and config.weights is None:
        warnings.warn("the paper starts Places-LT from ImageNet weights: give them with --weights FILE", stacklevel=2)
    with join(config.device) as world, _own_random_numbers(world.device):
        if download:
            from longtail.data.download import download_cifar

            if world.is_main:
                download_cifar(config.data, config.root, display)
            world.barrier()
        return Trainer(config, Path(out), world, display, resume=resume, trackers=trackers).run()


def _own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """A block whose seeds do not reach the caller's generators, on the CPU or on this device."""
    own = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=own)
