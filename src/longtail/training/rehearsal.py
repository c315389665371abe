"""One step on a copy before any file is written: finds errors early and measures how long the run will take."""

from __future__ import annotations

import copy
import time
from statistics import median

import torch

from longtail.config import TrainConfig
from longtail.distributed.world import World
from longtail.errors import UserError
from longtail.training.checkpoint import TrainState
from longtail.training.plan import Plan
from longtail.training.step import TrainingStep, new_optimizer, take_step
from longtail.training.streams import Streams

MOST_STEPS = 6
ENOUGH_SECONDS = 2.0  # after which no more steps are taken to know their time better


def rehearse(streams: Streams, state: TrainState, config: TrainConfig, plan: Plan, world: World) -> float:
    """Take a step on a copy of the network; returns the seconds that the steps from `state` on will take."""
    model, objective = copy.deepcopy((state.model, state.objective))
    trial = TrainState(model, objective, new_optimizer(model, objective, config))
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
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a batch of {config.batch_size} images does not fit into memory; use a smaller --batch-size, or "
            f"--accumulate {2 * config.accumulate} to split it into parts"
        ) from error
    # The first step also initialises the libraries.
    reading, computing = (median(part) for part in zip(*(times[1:] or times), strict=True))
    each = max(reading / config.workers, computing) if streams.decodes else reading + computing
    return each * (plan.steps - state.step)
