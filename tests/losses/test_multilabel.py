"""The loss for several labels per sample: the formula, its limits, and what torch and scikit-learn compute."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from longtail.errors import UserError
from longtail.losses import ClassBalancedBCE

COUNTS, SIZE = (4000, 300, 1), 5000


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 3, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(2, (7, 3), generator=generator)


def naive(logits, target, beta=0.999):
    """(N, K) losses, entry by entry."""
    losses = np.zeros(logits.shape)
    for k, positives in enumerate(COUNTS):
        sides = {1: positives, 0: SIZE - positives}
        weights = {side: (1 - beta) / (1 - beta**count) for side, count in sides.items()}
        scale = SIZE / sum(weights[side] * sides[side] for side in sides)
        for i in range(len(logits)):
            truth = int(target[i, k])
            probability = 1 / (1 + np.exp(-logits[i, k]))
            losses[i, k] = -scale * weights[truth] * np.log(probability if truth else 1 - probability)
    return losses


def test_the_formula(batch):
    logits, target = batch
    expected = naive(logits.detach().numpy(), target.numpy())
    for reduction, value in (("none", expected), ("mean", expected.mean()), ("sum", expected.sum())):
        loss = ClassBalancedBCE(COUNTS, num_samples=SIZE, beta=0.999, reduction=reduction)
        np.testing.assert_allclose(loss(logits, target).detach(), value, rtol=1e-9)
    assert repr(loss) == "ClassBalancedBCE(num_classes=3, num_samples=5000, beta=0.999, reduction='sum')"
    assert torch.autograd.gradcheck(lambda leaf: loss(leaf, target), logits)
    traced = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(logits, target), loss(logits, target))


def test_without_weights_it_is_the_loss_of_torch(batch):
    logits, target = batch
    soft = (0.3 * target + 0.2).double()
    results = []
    for loss in (ClassBalancedBCE(COUNTS, num_samples=SIZE, beta=0), nn.BCEWithLogitsLoss()):
        value = loss(logits, soft)
        results.append((value, *torch.autograd.grad(value, logits)))
    torch.testing.assert_close(*results)


def test_near_one_the_weights_are_balanced_as_in_scikit_learn():
    weights = ClassBalancedBCE(COUNTS, num_samples=SIZE, beta=1 - 1e-10).weights(torch.zeros(1, dtype=torch.float64))
    for column, positives in enumerate(COUNTS):
        labels = np.repeat([0, 1], [SIZE - positives, positives])
        expected = compute_class_weight("balanced", classes=np.array([1, 0]), y=labels)
        np.testing.assert_allclose(weights[:, column], expected, rtol=1e-5)


def test_labels_that_are_not_known_are_ignored(batch):
    logits, target = batch
    loss = ClassBalancedBCE(COUNTS, num_samples=SIZE)
    known = target.clone()
    known[0, 1], known[3, 2] = -100, -100
    each = ClassBalancedBCE(COUNTS, num_samples=SIZE, reduction="none")(logits, target)
    torch.testing.assert_close(loss(logits, known), each[known >= 0].mean())
    one = ClassBalancedBCE([3], num_samples=SIZE)  # one logit, two classes
    assert one(logits[:, :1], target[:, :1]).isfinite()


@pytest.mark.parametrize(
    ("counts", "size", "message"),
    [
        ([10, 0], 50, "class 1 has no training sample"),
        ([10, 50], 50, "label 1 has 50 positives among 50 samples, and no negative"),
        ([10, 5], 0, "num_samples must be a whole number of at least 1, not 0"),
        ([], 5, "needs at least one label, class_counts has 0"),
    ],
)
def test_impossible_counts_are_named(counts, size, message):
    with pytest.raises(UserError, match=message):
        ClassBalancedBCE(counts, num_samples=size)


def test_batches_that_do_not_fit_are_named(batch):
    logits, target = batch
    loss = ClassBalancedBCE(COUNTS, num_samples=SIZE)
    with pytest.raises(UserError, match=r"logits must have shape \(samples, 3\), one column per label, not \(7, 2\)"):
        loss(logits[:, :2], target)
    with pytest.raises(UserError, match=r"target must have the shape of the logits, \(7, 3\), not \(7,\)"):
        loss(logits, target[:, 0])
    with pytest.raises(UserError, match="target must be 0 or 1, a number between, or ignore_index -100"):
        loss(logits, target + 1)
