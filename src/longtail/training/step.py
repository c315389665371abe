"""The training images in the order in which the steps take them: one stream per sampler of the method."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longtail.config import TrainConfig
from longtail.data.cache import resident
from longtail.data.images import DecodedImages, Images
from longtail.data.loading import Batch, load
from longtail.data.samplers import Draw, Sampler
from longtail.data.splits import Splits
from longtail.distributed import World
from longtail.errors import UserError
from longtail.files.progress import Display
from longtail.networks.objective import Objective, Progress
from longtail.runs.network import transforms
from longtail.training.mixing import Mixing
from longtail.training.optimizer import TrainState
from longtail.training.plan import Plan

Parts = list[list[Batch]]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Streams:
    """Batches of a run for this process.

    Args:
        config: of the run.
        splits: its images.
        names: samplers of the method, one per stream.
        world: this process among those that train together.
        display: where progress of decoding is shown.
    """

    def __init__(
        self, config: TrainConfig, splits: Splits, names: Sequence[str], world: World, display: Display
    ) -> None:
        self.config = config
        self.splits = splits
        self.world = world
        self.display = display
        self.samplers = self._samplers(names)
        # One augmenting transform per stream: streams of one sampler show the same images differently.
        self.transforms = [transforms(config, stream)[0] for stream in range(len(self.samplers))]
        self.clean = transforms(config)[1]
        counts = splits.train.class_counts.to(world.device)
        self.mixing = Mixing(config.mix, config.mix_alpha, config.seed, counts) if config.mix != "none" else None

    def _samplers(self, names: Sequence[str]) -> list[Sampler]:
        config = self.config
        if config.sampler is not None:
            if len(names) > 1:
                raise UserError(f"{config.method} has its own samplers ({', '.join(names)}); leave out --sampler")
            names = (config.sampler,)
        if config.batch_size % (config.accumulate * self.world.size):
            raise UserError(
                f"--batch-size {config.batch_size} does not divide into {config.accumulate} parts x "
                f"{self.world.size} processes"
            )
        labels = self.splits.train.labels.numpy()
        epochs = Plan.of(config, len(labels)).progress(0).epochs
        return [Sampler(labels, name, seed=config.seed, epochs=epochs) for name in names]

    def open_images(self) -> None:
        """Move the images to where they are read fastest; raises if an image is broken."""
        self.images = self._resident(self.splits.train, augmented=True)
        held_out = self.splits.validation
        self.validation = None if held_out is None else self._resident(held_out, augmented=False)

    def _resident(self, images: Images, *, augmented: bool) -> Images:
        return resident(
            images,
            self.transforms[0] if augmented else self.clean,
            self.world.device,
            cache_gb=self.config.cache_gb,
            workers=self.config.workers,
            display=self.display,
        )

    @property
    def decodes(self) -> bool:
        """Whether worker processes decode images while the network computes."""
        return isinstance(self.images, DecodedImages) and self.config.workers > 0

    def batches(self, first: int, last: int, *, workers: int | None = None) -> Iterator[Parts]:
        """For each step from `first` to before `last`: for each part of the batch, one batch per stream."""
        workers = self.config.workers if workers is None else workers
        streams = [
            load(self.images, transform, self.draws(sampler, first, last), workers=workers, device=self.world.device)
            for transform, sampler in zip(self.transforms, self.samplers, strict=True)
        ]
        for step in range(first, last):
            parts = [[next(stream) for stream in streams] for _ in range(self.config.accumulate)]
            yield [[self.mixing(batch, step) for batch in part] for part in parts] if self.mixing else parts

    def draws(self, sampler: Sampler, first: int, last: int) -> Iterator[Draw]:
        """This process's draws of one stream, part by part."""
        parts = self.config.accumulate
        size = self.config.batch_size // parts
        for number in range(first * parts, last * parts):
            yield sampler.batch(number, size, self.world.rank, self.world.size)


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
        group["lr"] = progress.lr * state.objective.rate(group["part"], progress) * group["scale"]
    step.train()
    for module in state.frozen:
        module.eval()
    state.optimizer.zero_grad()
    total = torch.zeros((), device=world.device)
    for number, batches in enumerate(parts, 1):
        if isinstance(step, DistributedDataParallel):
            step.require_backward_grad_sync = number == len(parts)
        with torch.autocast(world.device.type, HALF.get(config.precision), enabled=config.precision in HALF):
            loss = step(batches, progress) / len(parts)
        state.scaler.scale(loss).backward()
        total += loss.detach()
    if config.clip_norm is not None:
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.parameters().values(), config.clip_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    if state.average is not None:
        state.average.update_parameters(state.model)
    state.step += 1
    return total


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
