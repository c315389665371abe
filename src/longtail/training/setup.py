"""What a training run needs in memory: its batches, network, optimiser and schedule; one step, and a trial step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longtail.backbones import evaluating
from longtail.config import TrainConfig
from longtail.data.augment import Transform
from longtail.data.cache import resident
from longtail.data.images import DecodedImages, Images, warn_of_copies
from longtail.data.loading import Batch, Draw, Sampler, load
from longtail.data.splits import Splits, image_side, open_splits
from longtail.distributed import World, join
from longtail.errors import UserError, choose, is_out_of_memory
from longtail.files.progress import Display
from longtail.methods import TRAIN_METHODS
from longtail.networks.objective import Objective, Progress, defer, no_deferral
from longtail.runs.network import build_network, settled, transforms
from longtail.runs.record import image_channels
from longtail.training.mixing import Mixing
from longtail.training.plan import Plan
from longtail.training.state import TrainState
from longtail.training.tuning import select

MicroBatches = list[list[Batch]]
"""The batches of a step: for each micro-batch, one batch per stream."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
TRIAL_STEPS = 6
TRIAL_SECONDS = 2.0  # after which no further steps are measured
USUAL_BATCH = 4096  # up to here a batch may have more images than the training set


class TrainingStep(nn.Module):
    """Computes the loss of batches: the module that DistributedDataParallel wraps."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batches: list[Batch], progress: Progress) -> Tensor:
        return self.objective(self.model, batches, progress)


class TrainingSetup:
    """A run before its first step: batches, a new network with its objective and optimiser, and the schedule.

    A method has one stream of images per sampler; a step takes a batch of each.

    Args:
        config: of the run, settled.
        splits: its images.
        world: this process among those that train together.
        display: where progress of decoding is shown.
    """

    def __init__(self, config: TrainConfig, splits: Splits, world: World, display: Display) -> None:
        self.config = config
        self.splits = splits
        self.world = world
        self.display = display
        method = TRAIN_METHODS[choose("method", config.method, TRAIN_METHODS)]
        image_side(config)  # or an error that says what is missing
        labels, counts = splits.train.labels.numpy(), splits.train.class_counts
        if config.batch_size > max(len(labels), USUAL_BATCH):
            raise UserError(f"a batch of {config.batch_size:,} images; the training set has {len(labels):,}")
        if config.sampler is not None and len(method.samplers) > 1:
            listed = ", ".join(method.samplers)
            raise UserError(f"{config.method} has its own samplers ({listed}); leave out --sampler")
        if config.batch_size % (config.accumulate * world.size):
            raise UserError(
                f"--batch-size {config.batch_size} does not divide into {config.accumulate} parts x "
                f"{world.size} processes"
            )
        names = (config.sampler,) if config.sampler else method.samplers
        epochs = Plan.of(config, len(labels)).progress(0).epochs
        self.samplers = [Sampler(labels, name, seed=config.seed, epochs=epochs) for name in names]
        # One augmenting transform per stream: streams of one sampler show the same images differently.
        self.transforms = [transforms(config, stream)[0] for stream in range(len(names))]
        self.clean = transforms(config)[1]
        on_device = counts.to(world.device)
        self.mixing = Mixing(config.mix, config.mix_alpha, config.seed, on_device) if config.mix != "none" else None
        torch.manual_seed(config.seed)
        model, objective = build_network(config, counts, image_channels(splits), start=True)
        select(model, config, splits.train)
        model = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.state = TrainState.new(model, adapted(objective, config, counts).to(world.device), config)
        self.plan = Plan.of(config, len(labels), streams=len(names), stages=objective.stages)

    def open_images(self) -> None:
        """Move the images to where they are read fastest; raises if an image is broken."""
        self.images = self._resident(self.splits.train, self.transforms[0])
        held_out = self.splits.validation
        if self.world.is_main:
            warn_of_copies(self.splits.train, validation=held_out, test=self.splits.test)
        self.validation = None if held_out is None else self._resident(held_out, self.clean)

    def _resident(self, images: Images, transform: Transform) -> Images:
        config, device = self.config, self.world.device
        return resident(
            images, transform, device, cache_gb=config.cache_gb, workers=config.workers, display=self.display
        )

    def batches(self, first: int, last: int, *, workers: int | None = None) -> Iterator[MicroBatches]:
        """The batches of each step from `first` to before `last`."""
        workers = self.config.workers if workers is None else workers
        streams = [
            load(self.images, transform, self.draws(sampler, first, last), workers=workers, device=self.world.device)
            for transform, sampler in zip(self.transforms, self.samplers, strict=True)
        ]
        for step in range(first, last):
            batches = [[next(stream) for stream in streams] for _ in range(self.config.accumulate)]
            yield [[self.mixing(batch, step) for batch in micro] for micro in batches] if self.mixing else batches

    def draws(self, sampler: Sampler, first: int, last: int) -> Iterator[Draw]:
        """The draws of one stream for this process, micro-batch by micro-batch."""
        count = self.config.accumulate
        for number in range(first * count, last * count):
            yield sampler.batch(number, self.config.batch_size // count, self.world.rank, self.world.size)

    def take_step(self, step: nn.Module, state: TrainState, batches: MicroBatches) -> Tensor:
        """One optimiser step on the micro-batches of a batch; returns the mean loss."""
        config, world = self.config, self.world
        seeds = np.random.SeedSequence((config.seed, state.step, world.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(seeds[0]))
        progress = self.plan.progress(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = progress.lr * state.objective.rate(group["part"], progress) * group["scale"]
        step.train()
        for module in state.frozen:
            module.eval()
        state.optimizer.zero_grad()
        total = torch.zeros((), device=world.device)
        for number, micro in enumerate(batches, 1):
            if isinstance(step, DistributedDataParallel):
                step.require_backward_grad_sync = number == len(batches)
            with torch.autocast(world.device.type, HALF.get(config.precision), enabled=config.precision in HALF):
                loss = step(micro, progress) / len(batches)
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

    def rehearse(self) -> float:
        """Take steps on a copy of the network; returns the seconds that the remaining steps will take.

        For --train head, the seconds that computing the features will take.
        """
        config, state = self.config, self.state
        if config.train == "head":
            begin = time.monotonic()
            images = next(self.batches(0, 1, workers=0))[0][0].images
            with evaluating(state.model):
                state.model(images)
            return (time.monotonic() - begin) / len(images) * len(self.splits.train) / self.world.size
        model, objective = copy.deepcopy((state.model, state.objective))
        trial, step = TrainState.new(model, objective, config), TrainingStep(model, objective)
        times: list[tuple[float, float]] = []
        begin = time.monotonic()
        try:
            # Several processes must take the same number of steps; a single one takes more for a better measurement.
            most = 1 if self.world.size > 1 else TRIAL_STEPS
            while len(times) < most and time.monotonic() - begin < TRIAL_SECONDS:
                trial.step = state.step
                start = time.monotonic()
                batches = next(self.batches(state.step, self.plan.steps, workers=0))
                middle = time.monotonic()
                float(self.take_step(step, trial, batches))
                times.append((middle - start, time.monotonic() - middle))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"a batch of {config.batch_size} images does not fit into memory; use a smaller --batch-size, or "
                f"--accumulate {2 * config.accumulate} to split it into parts"
            ) from error
        # The first step also initialises the libraries.
        reading, computing = (median(column) for column in zip(*(times[1:] or times), strict=True))
        if isinstance(self.images, DecodedImages) and config.workers > 0:  # decoded while the network computes
            return max(reading / config.workers, computing) * (self.plan.steps - state.step)
        return (reading + computing) * (self.plan.steps - state.step)


def seconds_of(config: TrainConfig, display: Display) -> float:
    """The seconds that a run will take here, without its evaluations; raises if it cannot work. Nothing is written."""
    config = settled(config)
    with join(config.device) as world, fork_rng(world.device):
        setup = TrainingSetup(config, open_splits(config), world, display)
        setup.open_images()
        return setup.rehearse()


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Inside the block, seeding does not change the caller's random generators, on the CPU or on this device."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def adapted(objective: Objective, config: TrainConfig, class_counts: Tensor) -> Objective:
    """The objective of a method with the label smoothing and the deferred class weights of a configuration.

    Raises if the method does not take these options.
    """
    soft = "--mix" if config.mix != "none" else "--label-smoothing" if config.label_smoothing else None
    if soft:
        _require_able(objective, config, soft, lambda objective: objective.one_class, class_counts)
    if config.defer is not None:
        _require_able(objective, config, "--defer", no_deferral, class_counts)
    if config.label_smoothing:
        for module in objective.modules():
            if hasattr(module, "label_smoothing"):
                setattr(module, "label_smoothing", config.label_smoothing)  # noqa: B010
    return objective if config.defer is None else defer(objective, class_counts, start=config.defer)


def _require_able(
    objective: Objective, config: TrainConfig, option: str, obstacle: Callable[[Objective], str], counts: Tensor
) -> None:
    """Refuse an option that the objective of a method does not take, and list the methods that do."""
    if reason := obstacle(objective):
        able = [name for name, method in TRAIN_METHODS.items() if not obstacle(method.objective(counts))]
        raise UserError(f"{config.method} takes no {option}, because {reason}; use another --method: {', '.join(able)}")


def warn_if_slow(config: TrainConfig, device: torch.device, display: Display) -> None:
    """Print one line if --precision makes training slower on this device instead of faster."""
    if config.precision == "fp16" and device.type == "cpu":
        display.line("--precision fp16 is for GPUs, and slow on this processor; leave the option out")
    if config.precision == "bf16" and emulates_bfloat16(device):
        display.line(
            f"--precision bf16 is slow here: this {'processor' if device.type == 'cpu' else 'GPU'} has no bfloat16 "
            "instructions and emulates them (measured on one such processor: ten times slower than fp32); "
            "leave the option out"
        )


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 without instructions for it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] < 8
    if device.type != "cpu":
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
