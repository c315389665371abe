"""Mixed images and labels beside a loop over single images, and a run that mixes beside one that is divided."""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

import longtail
from longtail.data.loading import Batch
from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.methods import TRAIN_METHODS
from longtail.training.mixing import Mixing
from longtail.training.setup import TrainingSetup, TrainingStep

COUNTS = torch.tensor([90, 31, 30, 10])
SOFT = ["softmax", "cbs", "cbw", "class-balanced", "balanced-softmax", "logit-adjusted", "causal-norm"]
DEFERRED = ["softmax", "cbs", "focal", "lade", "equalization", "balanced-softmax", "seesaw", "logit-adjusted"]


def batch_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 8, 6, generator=generator)
    labels = torch.randint(0, len(COUNTS), (size,), generator=generator)
    return Batch(images, labels, torch.arange(size))


def naive(kind, batch, seed, step, alpha):
    """The papers' formulas, one image and one pixel at a time."""
    rng = np.random.default_rng((*b"mix", seed, step))
    lam, (row, column) = rng.beta(alpha, alpha), rng.random(2)
    size, (height, width) = len(batch.labels), batch.images.shape[2:]
    half = [int(length * math.sqrt(1 - lam)) // 2 for length in (height, width)]
    middle = [int(row * height), int(column * width)]
    images, targets = torch.zeros_like(batch.images), torch.zeros(size, len(COUNTS))
    for i in range(size):
        j = i + 1 if i % 2 == 0 else i - 1
        j = i if j == size else j
        share, inside = lam, 0
        for y in range(height):
            for x in range(width):
                boxed = abs(y - middle[0] + 0.5) < half[0] and abs(x - middle[1] + 0.5) < half[1]
                inside += boxed
                own, other = batch.images[i, :, y, x], batch.images[j, :, y, x]
                plain = lam * own + (1 - lam) * other
                images[i, :, y, x] = plain if kind != "cutmix" else other if boxed else own
        if kind == "cutmix":
            share = 1 - inside / (height * width)
        ratio = COUNTS[batch.labels[i]] / COUNTS[batch.labels[j]]
        if kind == "remix" and ratio >= 3 and lam < 0.5:
            share = 0
        if kind == "remix" and ratio <= 1 / 3 and 1 - lam < 0.5:
            share = 1
        targets[i, batch.labels[i]] += share
        targets[i, batch.labels[j]] += 1 - share
    return images, targets


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "remix"])
@pytest.mark.parametrize(("size", "alpha"), [(8, 1.0), (7, 0.3), (1, 1.0)])
def test_a_mixed_batch_is_that_of_the_formulas(kind, size, alpha):
    batch = batch_of(size)
    before = batch.images.clone()
    for step in range(12):
        mixed = Mixing(kind, alpha, 5, COUNTS)(batch, step)
        images, targets = naive(kind, batch, 5, step, alpha)
        torch.testing.assert_close(mixed.images, images)
        torch.testing.assert_close(mixed.labels, targets)
    assert torch.equal(batch.images, before)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_micro_batches_and_processes_mix_the_same_pairs(short, kind):
    def mixed(accumulate, ranks):
        found = []
        for rank in range(ranks):
            world = World(rank, ranks, torch.device("cpu"))
            config = replace(short, mix=kind, accumulate=accumulate)
            setup = TrainingSetup(config, open_splits(config), world, QUIET)
            setup.open_images()
            found += [micro[0] for micro in next(setup.batches(3, 4))]
        order = torch.cat([batch.indices for batch in found]).argsort()
        return [torch.cat([getattr(batch, name) for batch in found])[order] for name in ("images", "labels")]

    whole = mixed(1, 1)
    for divided in (mixed(4, 1), mixed(1, 2), mixed(2, 2)):
        for one, other in zip(whole, divided, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", TRAIN_METHODS)
def test_a_method_takes_soft_targets_and_deferred_weights_or_says_why_not(method, short):
    for settings, able in (({"mix": "mixup"}, SOFT), ({"label_smoothing": 0.1}, SOFT), ({"defer": 0.5}, DEFERRED)):
        config = replace(short, method=method, **settings)
        refused = pytest.raises(
            UserError, match=rf"{method} takes no --\S+, because .*; use another --method: softmax,"
        )
        with nullcontext() if method in able else refused:
            setup = TrainingSetup(config, open_splits(config), SINGLE_PROCESS, QUIET)
            setup.open_images()
            step = TrainingStep(setup.state.model, setup.state.objective)
            setup.state.step = 9  # after the deferral
            assert setup.take_step(step, setup.state, next(setup.batches(9, 10))).isfinite()
    sigmoids = replace(short, method="class-balanced", options={"form": "sigmoid"}, mix="remix")
    with pytest.raises(UserError, match="class-balanced takes no --mix, because in the sigmoid form"):
        TrainingSetup(sigmoids, open_splits(sigmoids), SINGLE_PROCESS, QUIET)


def test_label_smoothing_is_that_of_the_loss(short):
    config = replace(short, method="balanced-softmax", label_smoothing=0.2)
    state = TrainingSetup(config, open_splits(config), SINGLE_PROCESS, QUIET).state
    logits, labels = torch.randn(6, 10), torch.arange(6)
    counts = open_splits(config).train.class_counts
    expected = longtail.losses.BalancedSoftmax(counts, label_smoothing=0.2)(logits, labels)
    torch.testing.assert_close(state.objective.loss(logits, labels), expected)
