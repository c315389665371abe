"""Mixed images and labels beside a loop over single images, and a run that mixes beside one that is divided."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longtail
from longtail.data.loading import Batch
from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS
from longtail.errors import UserError
from longtail.files.progress import QUIET
from longtail.methods import TRAIN_METHODS
from longtail.recipes import RECIPES
from longtail.training.mixing import Mixing, cut, remix
from longtail.training.rehearsal import prepare
from longtail.training.step import Streams

COUNTS = torch.tensor([90, 31, 30, 10])
SHORT = replace(RECIPES["digits-lt"], epochs=None, iterations=10, batch_size=16, warmup=0, device="cpu")
SOFT = ["softmax", "cbs", "cbw", "class-balanced", "balanced-softmax", "logit-adjusted", "causal-norm"]


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


@given(share=st.floats(0, 1), row=st.floats(0, 1, exclude_max=True), column=st.floats(0, 1, exclude_max=True))
def test_the_share_of_cutmix_is_that_of_the_pixels(share, row, column):
    images, others = torch.zeros(1, 1, 9, 5), torch.ones(1, 1, 9, 5)
    mixed, kept = cut(images, others, share, np.array([row, column]))
    assert kept == pytest.approx(1 - mixed.mean().item(), abs=1e-6)
    assert kept >= share - 1e-9  # a box is never larger than asked for


def test_remix_prefers_the_smaller_class_where_sizes_differ_threefold():
    first, second = torch.tensor([90, 90, 10, 10, 30]), torch.tensor([30, 31, 30, 30, 90])
    low, high = torch.full((5,), 0.4), torch.full((5,), 0.6)
    torch.testing.assert_close(remix(low, first, second), torch.tensor([0.0, 0.4, 0.4, 0.4, 0.4]))
    torch.testing.assert_close(remix(high, first, second), torch.tensor([0.6, 0.6, 1.0, 1.0, 1.0]))
    half = torch.full((5,), 0.5)
    torch.testing.assert_close(remix(half, first, second), half)  # tau itself changes nothing


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_micro_batches_and_processes_mix_the_same_pairs(kind):
    def mixed(accumulate, ranks):
        found = []
        for rank in range(ranks):
            world = SimpleNamespace(rank=rank, size=ranks, device=torch.device("cpu"), is_main=rank == 0)
            config = replace(SHORT, mix=kind, accumulate=accumulate)
            streams = Streams(config, open_splits(config), ("instance",), world, QUIET)
            streams.open_images()
            found += [part[0] for part in next(streams.batches(3, 4))]
        order = torch.cat([batch.indices for batch in found]).argsort()
        return [torch.cat([getattr(batch, name) for batch in found])[order] for name in ("images", "labels")]

    whole = mixed(1, 1)
    for divided in (mixed(4, 1), mixed(1, 2), mixed(2, 2)):
        for one, other in zip(whole, divided, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", TRAIN_METHODS)
@pytest.mark.parametrize("soft", [{"mix": "mixup"}, {"label_smoothing": 0.1}])
def test_a_loss_takes_soft_targets_or_says_why_not(method, soft, tmp_path):
    config = replace(SHORT, method=method, iterations=2, **soft)
    if method in SOFT:
        longtail.train(config, tmp_path / "run", progress=False)
        return
    with pytest.raises(UserError, match=rf"{method} takes no --\S+, because .*; use another --method: softmax, cbs,"):
        longtail.train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_form_without_soft_targets_is_refused(tmp_path):
    config = replace(SHORT, method="class-balanced", options={"form": "sigmoid"}, mix="remix")
    with pytest.raises(UserError, match="class-balanced takes no --mix, because in the sigmoid form"):
        longtail.train(config, tmp_path / "run")


def test_label_smoothing_is_that_of_the_loss():
    config = replace(SHORT, method="balanced-softmax", label_smoothing=0.2)
    _, state, _ = prepare(config, open_splits(config), SINGLE_PROCESS, QUIET)
    logits, labels = torch.randn(6, 10), torch.arange(6)
    counts = open_splits(config).train.class_counts
    expected = longtail.losses.BalancedSoftmax(counts, label_smoothing=0.2)(logits, labels)
    torch.testing.assert_close(state.objective.loss(logits, labels), expected)
