"""One step on a copy before any file is written: finds errors early and measures how long the run will take."""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager
from statistics import median

import torch
from torch import Tensor, nn

from longtail.backbones.inference import evaluating
from longtail.config import TrainConfig
from longtail.data.splits import Splits, image_side, open_splits
from longtail.distributed import World, join
from longtail.errors import UserError, choose, is_out_of_memory
from longtail.files.progress import Display
from longtail.methods import TRAIN_METHODS
from longtail.networks.objective import Objective, defer
from longtail.runs.network import build_network, settled
from longtail.runs.record import image_channels
from longtail.training.optimizer import TrainState
from longtail.training.plan import Plan
from longtail.training.step import Streams, TrainingStep, take_step
from longtail.training.tuning import select

MOST_STEPS = 6
ENOUGH_SECONDS = 2.0  # seconds after which no further steps are measured
USUAL_BATCH = 4096  # up to here a batch may have more images than the training set


def seconds_of(config: TrainConfig, display: Display) -> float:
    """The seconds that a run will take here, without its evaluations; raises if it cannot work. Nothing is written."""
    config = settled(config)
    with join(config.device) as world, own_random_numbers(world.device):
        streams, state, plan = prepare(config, open_splits(config), world, display)
        streams.open_images()
        return rehearse(streams, state, config, plan, world)


def prepare(config: TrainConfig, splits: Splits, world: World, display: Display) -> tuple[Streams, TrainState, Plan]:
    """A run before its first step: its batches, a new network and its plan."""
    method = TRAIN_METHODS[choose("method", config.method, TRAIN_METHODS)]
    image_side(config)  # or an error that says what is missing
    if config.batch_size > max(len(splits.train), USUAL_BATCH):
        raise UserError(f"a batch of {config.batch_size:,} images; the training set has {len(splits.train):,}")
    streams = Streams(config, splits, method.samplers, world, display)
    model, objective = new_network(config, splits)
    select(model, config)
    model = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    objective = adapted(objective, config, splits.train.class_counts).to(world.device)
    state = TrainState.new(model, objective, config)
    plan = Plan.of(config, len(splits.train), streams=len(streams.samplers), stages=objective.stages)
    return streams, state, plan


def new_network(config: TrainConfig, splits: Splits) -> tuple[nn.Module, Objective]:
    """A network before its first step, from the weights of the configuration or from its seed, and its objective."""
    torch.manual_seed(config.seed)
    return build_network(config, splits.train.class_counts, image_channels(splits), start=True)


def adapted(objective: Objective, config: TrainConfig, class_counts: Tensor) -> Objective:
    """The objective of a method with the label smoothing and the deferred class weights of a configuration.

    Raises if mixed images or label smoothing give soft targets to a loss that takes none.
    """
    soft = "--mix" if config.mix != "none" else "--label-smoothing" if config.label_smoothing else None
    if soft and objective.one_class:
        able = [name for name, method in TRAIN_METHODS.items() if not method.objective(class_counts).one_class]
        reason = f"{config.method} takes no {soft}, because {objective.one_class}"
        raise UserError(f"{reason}; use another --method: {', '.join(able)}")
    if config.label_smoothing:
        for module in objective.modules():
            if hasattr(module, "label_smoothing"):
                setattr(module, "label_smoothing", config.label_smoothing)  # noqa: B010
    return objective if config.defer is None else defer(objective, class_counts, start=config.defer)


def say_if_slow(config: TrainConfig, device: torch.device, display: Display) -> None:
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


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Inside the block, seeding does not change the caller's random generators, on the CPU or on this device."""
    own = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=own)


def rehearse(streams: Streams, state: TrainState, config: TrainConfig, plan: Plan, world: World) -> float:
    """Take a step on a copy of the network; returns the seconds that the steps from `state` on will take.

    For --train head, the seconds that computing the features will take.
    """
    if config.train == "head":
        begin = time.monotonic()
        images = next(streams.batches(0, 1, workers=0))[0][0].images
        with evaluating(state.model):
            state.model(images)
        return (time.monotonic() - begin) / len(images) * len(streams.splits.train) / world.size
    model, objective = copy.deepcopy((state.model, state.objective))
    trial = TrainState.new(model, objective, config)
    step = TrainingStep(model, objective)
    times: list[tuple[float, float]] = []
    begin = time.monotonic()
    try:
        # Several processes must all take the same number of steps; a single one takes more for a better measurement.
        while len(times) < (1 if world.size > 1 else MOST_STEPS) and time.monotonic() - begin < ENOUGH_SECONDS:
            start = time.monotonic()
            parts = next(streams.batches(state.step, plan.steps, workers=0))
            middle = time.monotonic()
            float(take_step(step, trial, parts, config, plan, world))
            times.append((middle - start, time.monotonic() - middle))
            trial.step = state.step
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"a batch of {config.batch_size} images does not fit into memory; use a smaller --batch-size, or "
            f"--accumulate {2 * config.accumulate} to split it into parts"
        ) from error
    # The first step also initialises the libraries.
    reading, computing = (median(part) for part in zip(*(times[1:] or times), strict=True))
    each = max(reading / config.workers, computing) if streams.decodes else reading + computing
    return each * (plan.steps - state.step)
