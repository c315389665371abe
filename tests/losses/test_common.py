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
    SupCon,
    WeightedCrossEntropy,
)

COUNTS = [1000, 200, 30, 5, 1]


def batch(size=12, classes=5, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64).to(dtype)
    return logits, torch.randint(classes, (size,), generator=generator)


def test_extreme_logits_give_a_finite_loss_and_gradient_in_float32(every):
    loss = every(COUNTS)
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


def test_gradients_are_those_of_the_value(every):
    loss = every(COUNTS).eval()
    if every.name == "seesaw":
        loss.q = 0.0  # no gradient goes through the compensation: its own test sees to it
        loss.seen_counts.copy_(torch.tensor(COUNTS))
    logits, target = batch(6, dtype=torch.float64)
    target[0] = -100
    assert torch.autograd.gradcheck(lambda leaf: loss(leaf, target), logits.requires_grad_())


def test_counts_come_as_list_array_or_tensor(counted):
    logits, target = batch()
    forms = (COUNTS, tuple(COUNTS), np.array(COUNTS), np.array(COUNTS[::-1])[::-1], torch.tensor(COUNTS))
    forms = (*forms, torch.tensor(COUNTS, dtype=torch.float32), np.array(COUNTS, dtype=np.float64))
    results = [counted(counts)(logits, target) for counts in forms]
    assert all(torch.equal(result, results[0]) for result in results)


def test_precision_is_that_of_the_logits_and_single_at_least(every):
    logits, target = batch(dtype=torch.bfloat16)
    values = {}
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        leaf = logits.to(dtype).requires_grad_()
        values[dtype] = every(COUNTS)(leaf, target.to(torch.int32 if dtype == torch.float32 else torch.int64))
        assert values[dtype].dtype == expected
        values[dtype].backward()
        assert leaf.grad.dtype == dtype
    assert values[torch.bfloat16].item() == values[torch.float32].item()
    assert values[torch.float32].item() == pytest.approx(values[torch.float64].item(), rel=1e-5)


def test_half_precision_modules_keep_their_class_counts(counted):
    # Class weights are kept in the precision given: these are exact in half precision.
    exact = {"class_weights": [1.0, 2.0, 4.0, 8.0, 16.0]} if "class_weights" in counted.settings else {}
    logits, target = batch()
    halved = counted(COUNTS, **exact).bfloat16()(logits, target)
    assert halved.item() == counted(COUNTS, **exact)(logits, target).item()


def test_nothing_stays_on_the_cpu(every):
    """On the meta device an operation that mixes devices, or waits for a value, is an error."""
    loss = every(COUNTS).to("meta")
    logits, target = batch()
    assert loss(logits.to("meta"), target.to("meta")).shape == ()
    if every.soft:
        assert loss(logits.to("meta"), logits.softmax(1).to("meta")).shape == ()


def test_only_what_accumulates_is_saved(every):
    assert list(every(COUNTS).state_dict()) == (["seen_counts"] if every.name == "seesaw" else [])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([5, 5, 0, 5, 5], r"class 2 has no training sample; \w+ needs at least one per class \(class_counts\[2\] == "),
        ([5, 5, -3, 5, 5], r"class_counts\[2\] is negative"),
        ([5, 5.5, 5, 5, 5], "class_counts must be whole numbers"),
        ([5, float("nan"), 5, 5, 5], "class_counts must be whole numbers"),
        ([7], "needs at least two classes, class_counts has 1"),
        ([[1, 2], [3, 4]], r"class_counts must be one number per class, not torch.int64 of shape \(2, 2\)"),
        ([True, False], "class_counts must be one number per class, not torch.bool"),
        ([1 + 1j, 2], "class_counts must be one number per class, not torch.complex128"),
        (["a", "b"], "class_counts must be one number per class"),
    ],
)
def test_bad_counts_are_named(counted, counts, message):
    with pytest.raises(UserError, match=message) as caught:
        counted(counts)
    assert "\n" not in str(caught.value)


def test_another_number_of_classes_is_named(counted):
    name = type(counted(COUNTS)).__name__
    with pytest.raises(
        UserError, match=rf"logits of shape \(12, 4\) have 4 classes in dimension 1, but {name} was built fo"
    ):
        counted(COUNTS)(*batch(classes=4))
    with pytest.raises(
        UserError, match=rf"logits of shape \(4,\) have 4 classes in dimension 0, but {name} was built for 5"
    ):
        counted(COUNTS)(torch.zeros(4), torch.tensor(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, y: (z, y[:-1]), r"target must hold one class number per sample: shape \(12,\)"),
        (lambda z, y: (z, y.float()), r"whole numbers.*, not \(12,\) of torch.float32"),
        (lambda z, y: (z, y.tolist()), "target must be a tensor of class numbers, not list"),
        (lambda z, y: (z, F.one_hot(y, 5)), r"one class number per sample.* not \(12, 5\) of torch.int64"),
        (lambda z, y: (z, y + 1), r"target must be a class number 0\.\.4 or .* found 1\.\.5"),
        (lambda z, y: (z, y.masked_fill(y == 2, -1)), r"or ignore_index -100; found -1\.\.4"),
        (lambda z, y: (z[:0], y[:0]), "the batch is empty"),
        (lambda z, y: (z[0], y), r"one class number per sample: shape \(\)"),
        (lambda z, y: (z[0, 0], y), r"logits must have shape \(samples, classes\)"),
        (lambda z, y: (z[:, :1], 0 * y), "at least two classes"),
        (lambda z, y: (z.numpy(), y), "logits must be a tensor, not ndarray"),
    ],
)
def test_bad_batches_are_named(every, change, message):
    logits = batch()[0]
    target = torch.tensor([0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 4])
    with pytest.raises(UserError, match=message):
        every(COUNTS)(*change(logits, target))


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (WeightedCrossEntropy, {"divide_by": "sum"}, "unknown divide_by 'sum'; choose from: batch, weights"),
        (ClassBalanced, {"form": "sigmoids"}, "unknown form 'sigmoids' .*choose from: softmax, sigmoid, focal"),
        (ClassBalanced, {"form": 3}, "unknown form 3; choose from"),
        (ClassBalanced, {"beta": 1}, "beta must be a number, at least 0 and below 1, not 1"),
        (ClassBalanced, {"gamma": "two"}, "gamma must be a number, at least 0, not 'two'"),
        (ClassBalanced, {"divide_by": "sum"}, "unknown divide_by"),
        (LDAM, {"scale": 0}, "scale must be a number, above 0, not 0"),
        (LDAM, {"max_margin": None}, "max_margin must be a number"),
        (LDAM, {"max_margin": -0.1}, "max_margin must be a number, at least 0"),
        (LDAM, {"divide_by": "sum"}, "unknown divide_by"),
        (LDAM, {"class_weights": [1.0, 2.0]}, "class_weights has 2 numbers for 5 classes"),
        (LDAM, {"class_weights": [1.0, 2.0, 0.0, 1.0, 1.0]}, "class_weights must be finite and above 0"),
        (LDAM, {"class_weights": [1.0, 2.0, float("inf"), 1.0, 1.0]}, "class_weights must be finite and above 0"),
        (LADE, {"alpha": -1}, "alpha must be a number, at least 0, not -1"),
        (LADE, {"remine_lambda": float("inf")}, "remine_lambda must be a number"),
        (LADE, {"remine_lambda": -1}, "remine_lambda must be a number, at least 0"),
        (Equalization, {"gamma": 1.5}, "gamma must be a number, at least 0 and at most 1, not 1.5"),
        (Equalization, {"gamma": -0.5}, "gamma must be a number, at least 0 and at most 1, not -0.5"),
        (Equalization, {"threshold": True}, "threshold must be a number"),
        (Equalization, {"threshold": -1}, "threshold must be a number, at least 0 and at most 1"),
        (Equalization, {"threshold": 1.1}, "threshold must be a number, at least 0 and at most 1"),
        (Seesaw, {"p": -0.1}, "p must be a number"),
        (Seesaw, {"q": -0.1}, "q must be a number"),
        (Seesaw, {"eps": 0}, "eps must be a number, above 0 and at most 1"),
        (Seesaw, {"eps": 1.1}, "eps must be a number, above 0 and at most 1"),
        (LogitAdjusted, {"tau": -1}, "tau must be a number"),
    ],
)
def test_bad_settings_are_named(loss, settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        loss(COUNTS, **settings)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (WeightedCrossEntropy(COUNTS), "WeightedCrossEntropy(num_classes=5, divide_by='weights')"),
        (BalancedSoftmax(COUNTS), "BalancedSoftmax(num_classes=5)"),
        (
            BalancedSoftmax(COUNTS, reduction="none", ignore_index=255, label_smoothing=0.1),
            "BalancedSoftmax(num_classes=5, reduction='none', ignore_index=255, label_smoothing=0.1)",
        ),
        (LogitAdjusted(COUNTS, tau=2), "LogitAdjusted(num_classes=5, tau=2.0)"),
        (
            ClassBalanced(COUNTS),
            "ClassBalanced(num_classes=5, form='softmax', beta=0.9999, gamma=2.0, divide_by='batch')",
        ),
        (Focal(), "Focal(gamma=2.0, form='softmax')"),
        (Focal(class_weights=[1.0, 2.0]), "Focal(num_classes=2, gamma=2.0, form='softmax')"),
        (
            LDAM(COUNTS, reduction="sum"),
            "LDAM(num_classes=5, max_margin=0.5, scale=30.0, divide_by='weights', scaled=False, reduction='sum')",
        ),
        (LADE(COUNTS), "LADE(num_classes=5, alpha=0.1, remine_lambda=0.1)"),
        (Equalization(COUNTS), "Equalization(num_classes=5, gamma=0.9, threshold=0.005)"),
        (Seesaw(COUNTS), "Seesaw(num_classes=5, p=0.8, q=2.0, eps=0.01)"),
        (SupCon(), "SupCon(temperature=0.1, base_temperature=0.1, anchors='all')"),
    ],
)
def test_a_loss_shows_its_settings_and_defaults(loss, shown):
    assert repr(loss) == shown


def test_losses_are_there_without_importing_them():
    code = "import longtail; print(len(longtail.losses.__all__), longtail.losses.LDAM([5, 1]).num_classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "11 2\n"
