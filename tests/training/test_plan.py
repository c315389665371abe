"""The schedule of a run, recomputed naively."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from longtail.recipes import RECIPES
from longtail.training.plan import Plan

PLAN = Plan(steps=40, batch_size=30, epoch_images=100, lr=0.4, warmup=4, warmup_from=0.1, streams=2)


def test_length_by_epochs_or_iterations():
    config = replace(RECIPES["digits-lt"], epochs=2.5, iterations=None, batch_size=64, lr=0.3, warmup=7)
    plan = Plan.of(config, 107, streams=3, stages=2)
    assert plan == Plan(math.ceil(2.5 * 107 / 64), 64, 107, 0.3, 7, config.warmup_from, 3, 2)
    assert Plan.of(replace(config, epochs=None, iterations=9), 107) == Plan(9, 64, 107, 0.3, 7, config.warmup_from)
    assert Plan(steps=1, batch_size=1, epoch_images=1, lr=1.0) == Plan(1, 1, 1, 1.0, 0, 0.0, 1, 1)


def test_epochs_and_images_of_a_step():
    for step in range(41):
        assert PLAN.epochs_at(step) == pytest.approx(0.3 * step)
        assert PLAN.epoch(step) == math.floor(30 * step / 100)
        assert PLAN.images_at(step) == 60 * step
    assert PLAN.named(1) == "epoch 1/12"
    assert PLAN.named(4) == "epoch 1/12"
    assert PLAN.named(5) == "epoch 2/12"
    assert PLAN.named(40) == "epoch 12/12"
    progress = PLAN.progress(20)
    assert (progress.step, progress.steps, progress.epoch, progress.epochs) == (20, 40, 6, 12.0)
    assert progress.lr == PLAN.learning_rate(20)


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_what_is_due_after_so_many_epochs(every):
    """When the images seen pass a multiple of that many epochs, and after the last step."""
    due = [step for step in range(40) if PLAN.due(step, every)]
    passed = [step for step in range(40) if (step + 1) * 30 // (100 * every) > step * 30 // (100 * every)]
    assert due == sorted({*passed, 39})


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_learning_rate_rises_and_falls_in_every_stage(stages):
    plan = replace(PLAN, stages=stages)
    edges = [math.ceil(stage * 40 / stages) for stage in range(stages + 1)]
    for first, last in pairwise(edges):
        for step in range(first, last):
            done, length = step - first, last - first
            if done < 4:
                expected = 0.1 + 0.3 * (done + 1) / 4
            else:
                expected = 0.4 * (1 + math.cos(math.pi * (done - 4) / (length - 4))) / 2
            assert plan.learning_rate(step) == pytest.approx(expected)
    only = Plan(steps=4, batch_size=1, epoch_images=1, lr=1.0, warmup=4)
    assert [only.learning_rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert only.learning_rate(4) == 1.0  # after the last step, where nothing is left of the cosine
