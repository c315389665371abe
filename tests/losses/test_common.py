"""What holds for every loss on logits."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.errors import UserError
from longtail.losses import (
    LADE,
    LDAM,
    BalancedSoftmax,
    ClassBalanced,
    Equalization,
    Focal,
    LogitAdjusted,
    Seesaw,
    WeightedCrossEntropy,
)

COUNTS = [1000, 200, 30, 5, 1]

COUNTED = {
    "weighted": WeightedCrossEntropy,
    "weighted, batch": lambda counts: WeightedCrossEntropy(counts, divide_by="batch"),
    "class-balanced": ClassBalanced,
    "class-balanced, weights": lambda counts: ClassBalanced(counts, divide_by="weights"),
    "class-balanced sigmoid": lambda counts: ClassBalanced(counts, form="sigmoid"),
    "class-balanced focal": lambda counts: ClassBalanced(counts, form="focal", gamma=0.5),
    "ldam": LDAM,
    "ldam scaled": lambda counts: LDAM(counts, scaled=True),
    "ldam, re-weighted": lambda counts: LDAM(counts, class_weights=1 / np.asarray(counts)),
    "lade": LADE,
    "equalization": lambda counts: Equalization(counts, threshold=0.05),
    "balanced softmax": BalancedSoftmax,
    "seesaw": Seesaw,
    "logit-adjusted": LogitAdjusted,
}
EVERY = COUNTED | {
    "focal": lambda counts: Focal(),
    "focal, half": lambda counts: Focal(gamma=0.5),
    "focal sigmoid": lambda counts: Focal(gamma=0.5, form="sigmoid"),
    "focal, weighted": lambda counts: Focal(class_weights=1 / np.asarray(counts)),
}


def batch(size=12, classes=5, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64).to(dtype)
    return logits, torch.randint(classes, (size,), generator=generator)


@pytest.mark.parametrize("name", EVERY)
def test_extreme_logits_give_a_finite_loss_and_gradient_in_float32(name):
    loss = EVERY[name](COUNTS)
    extremes = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    for target in (torch.arange(5), torch.tensor([0, 0, 0, 3, 3])):  # one sample per class; classes absent
        for shift in range(5):
            logits = torch.stack([extremes.roll(row + shift) for row in range(5)]).requires_grad_()
            result = loss(logits, target)
            result.backward()
            assert result.isfinite()
            assert logits.grad.isfinite().all()
    for value in (1e4, -1e4, 0.0):
        logits = torch.full((1, 5), value, requires_grad=True)
        result = loss(logits, torch.tensor([4]))
        result.backward()
        assert result.isfinite()
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_the_value(name):
    loss = EVERY[name](COUNTS).eval()
    if name == "seesaw":
        loss.q = 0.0  # no gradient goes through the compensation: its own test sees to it
        loss.seen_counts.copy_(torch.tensor(COUNTS))
    logits, target = batch(6, dtype=torch.float64)

    def value(leaf):
        torch.manual_seed(0)
        return loss(leaf, target)

    assert torch.autograd.gradcheck(value, logits.requires_grad_())


@pytest.mark.parametrize("name", COUNTED)
def test_counts_come_as_list_array_or_tensor(name):
    logits, target = batch()
    forms = (COUNTS, tuple(COUNTS), np.array(COUNTS), np.array(COUNTS[::-1])[::-1], torch.tensor(COUNTS))
    forms = (*forms, torch.tensor(COUNTS, dtype=torch.float32), np.array(COUNTS, dtype=np.float64))
    results = []
    for counts in forms:
        torch.manual_seed(0)
        results.append(COUNTED[name](counts)(logits, target))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", EVERY)
def test_precision_is_that_of_the_logits_and_single_at_least(name):
    logits, target = batch(dtype=torch.bfloat16)
    values = {}
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        torch.manual_seed(0)
        loss = EVERY[name](COUNTS)
        leaf = logits.to(dtype).requires_grad_()
        draw = (torch.rand(logits.shape) < 0.9,) if name == "equalization" else ()
        values[dtype] = loss(leaf, target.to(torch.int32 if dtype == torch.float32 else torch.int64), *draw)
        assert values[dtype].dtype == expected
        values[dtype].backward()
        assert leaf.grad.dtype == dtype
    assert values[torch.bfloat16].item() == values[torch.float32].item()
    assert values[torch.float32].item() == pytest.approx(values[torch.float64].item(), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in COUNTED if name != "ldam, re-weighted"])
def test_half_precision_modules_keep_their_class_counts(name):
    logits, target = batch()
    values = []
    for loss in (EVERY[name](COUNTS), EVERY[name](COUNTS).bfloat16()):
        torch.manual_seed(0)
        values.append(loss(logits, target).item())
    assert values[0] == values[1]


@pytest.mark.parametrize("name", EVERY)
def test_nothing_stays_on_the_cpu(name):
    """On the meta device an operation that mixes devices, or waits for a value, is an error."""
    loss = EVERY[name](COUNTS).to("meta")
    logits, target = batch()
    assert loss(logits.to("meta"), target.to("meta")).shape == ()


@pytest.mark.parametrize("name", EVERY)
def test_only_what_accumulates_is_saved(name):
    assert list(EVERY[name](COUNTS).state_dict()) == (["seen_counts"] if name == "seesaw" else [])


@pytest.mark.parametrize("name", [name for name in COUNTED if "sigmoid" not in name and "focal" not in name])
def test_equal_counts_are_cross_entropy(name):
    logits, target = batch(dtype=torch.float64)
    loss = COUNTED[name]([40] * 5).eval()
    expected = F.cross_entropy(logits, target)
    if name == "seesaw":
        loss.q = 0.0
    if name.startswith("ldam"):
        loss.max_margin = 0.0  # equal margins are still margins
        expected = F.cross_entropy(logits * (1 if loss.scaled else 30), target)
    if name == "lade":
        loss.alpha = 0.0
    assert loss(logits, target).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            [5, 5, 0, 5, 5],
            r"class 2 has no training sample; \w+ needs at least one per class \(class_counts\[2\] == ",
        ),
        ([5, 5, -3, 5, 5], r"class_counts\[2\] is negative"),
        ([5, 5.5, 5, 5, 5], "class_counts must be whole numbers"),
        ([5, float("nan"), 5, 5, 5], "class_counts must be whole numbers"),
        ([7], "needs at least two classes, class_counts has 1"),
        ([[1, 2], [3, 4]], r"class_counts must be one number per class, not torch.int64 of shape \(2, 2\)"),
        (["a", "b"], "class_counts must be one number per class"),
    ],
)
def test_bad_counts_are_named(name, counts, message):
    loss = type(COUNTED[name](COUNTS))
    with pytest.raises(UserError, match=message) as caught:
        loss(counts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", COUNTED)
def test_another_number_of_classes_is_named(name):
    logits, target = batch(classes=4)
    with pytest.raises(UserError, match="logits have 4 columns, class_counts 5 classes"):
        COUNTED[name](COUNTS)(logits, target)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, y: (z, y[:-1]), r"target must hold one class number per sample: shape \(12,\)"),
        (lambda z, y: (z, y.float()), "whole numbers, not .* of torch.float32"),
        (lambda z, y: (z, F.one_hot(y, 5)), "one class number per sample"),
        (lambda z, y: (z, y + 1), r"target must be 0\.\.4, one column of the logits each; found 1\.\.5"),
        (lambda z, y: (z, y.masked_fill(y == 2, -100)), r"found -100\.\.4"),
        (lambda z, y: (z[:0], y[:0]), "the batch is empty"),
        (lambda z, y: (z[0], y), r"logits must have shape \(samples, classes\)"),
        (lambda z, y: (z[:, :1], 0 * y), "at least two classes"),
    ],
)
def test_bad_batches_are_named(name, change, message):
    logits = batch()[0]
    target = torch.tensor([0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 4])
    with pytest.raises(UserError, match=message):
        EVERY[name](COUNTS)(*change(logits, target))


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (WeightedCrossEntropy, {"divide_by": "sum"}, "unknown divide_by 'sum'; choose from: batch, weights"),
        (ClassBalanced, {"form": "sigmoids"}, "unknown form 'sigmoids' .*choose from: softmax, sigmoid, focal"),
        (ClassBalanced, {"form": 3}, "unknown form 3; choose from"),
        (ClassBalanced, {"beta": 1}, "beta must be a number, at least 0 and below 1, not 1"),
        (ClassBalanced, {"gamma": "two"}, "gamma must be a number, at least 0, not 'two'"),
        (LDAM, {"scale": 0}, "scale must be a number, above 0, not 0"),
        (LDAM, {"max_margin": None}, "max_margin must be a number"),
        (LDAM, {"class_weights": [1.0, 2.0]}, "class_weights has 2 numbers for 5 classes"),
        (LDAM, {"class_weights": [1.0, 2.0, 0.0, 1.0, 1.0]}, "class_weights must be finite and above 0"),
        (LADE, {"alpha": -1}, "alpha must be a number, at least 0, not -1"),
        (LADE, {"remine_lambda": float("inf")}, "remine_lambda must be a number"),
        (Equalization, {"gamma": 1.5}, "gamma must be a number, at least 0 and at most 1, not 1.5"),
        (Equalization, {"threshold": True}, "threshold must be a number"),
        (Seesaw, {"p": -0.1}, "p must be a number"),
        (Seesaw, {"eps": 0}, "eps must be a number, above 0 and at most 1"),
        (LogitAdjusted, {"tau": -1}, "tau must be a number"),
    ],
)
def test_bad_settings_are_named(loss, settings, message):
    with pytest.raises(UserError, match=message):
        loss(COUNTS, **settings)


def test_losses_are_there_without_importing_them():
    code = "import longtail; print(len(longtail.losses.__all__), longtail.losses.LDAM([5, 1]).num_classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "10 2\n"
