import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longtail.data.loading import Batch
from longtail.errors import UserError
from longtail.losses import (
    LADE,
    LDAM,
    BalancedSoftmax,
    Equalization,
    Focal,
    LogitAdjusted,
    Seesaw,
    WeightedCrossEntropy,
)
from longtail.losses.class_balanced import effective_number_weights
from longtail.networks.causal_norm import CausalNormObjective
from longtail.networks.objective import Deferred, LossObjective, Progress, defer, deferred_ldam


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, logits, target):
        return torch.tensor(self.value)


def course(steps, **settings):
    """Which loss each step takes: 1 or 2."""
    objective = Deferred(Constant(1), Constant(2), **settings)
    batch = Batch(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    return [int(objective(nn.Identity(), [batch], Progress(step, steps, 0, 1.0))) for step in range(steps)]


@pytest.mark.parametrize("steps", [5, 10, 200, 13_000])
def test_the_second_loss_has_the_last_fifth(steps):
    assert course(steps) == [1] * (steps * 4 // 5) + [2] * (steps // 5)


def test_it_starts_where_it_is_told():
    assert course(4, start=0.5) == [1, 1, 2, 2]
    assert course(4, start=0.6) == [1, 1, 1, 2]
    assert course(4, start=0) == [2, 2, 2, 2]
    assert course(4, start=1) == [1, 1, 1, 1]
    with pytest.raises(UserError, match="start must be a number, at least 0 and at most 1, not 160"):
        Deferred(Constant(1), Constant(2), start=160)


def test_what_its_losses_accumulate_is_saved():
    objective = Deferred(Seesaw([3, 1]), LDAM([3, 1]))
    assert list(objective.state_dict()) == ["first.loss.seen_counts"]


def test_deferred_ldam_is_that_of_its_authors(golden):
    """Plain at 0-based epoch 159 of 200, re-weighted from epoch 160 on."""
    for case in golden("ldam"):
        cosines, target = torch.from_numpy(case["logits"]), torch.from_numpy(case["target"])
        for number, (max_margin, scale) in enumerate(zip(case["max_m"], case["s"], strict=True)):
            objective = deferred_ldam(case["class_counts"], max_margin=max_margin, scale=scale)
            batch = Batch(scale * cosines, target, target)
            for epoch, name in ((0, "loss"), (159, "loss"), (160, "loss_drw"), (199, "loss_drw")):
                value = objective(nn.Identity(), [batch], Progress(epoch, 200, epoch, 200.0))
                assert value.item() == pytest.approx(case[name][number], rel=1e-6)


def test_deferred_ldam_passes_its_settings_on():
    objective = deferred_ldam([90, 9, 1], beta=0.9, start=0.4, divide_by="batch")
    weights = effective_number_weights(torch.tensor([90.0, 9.0, 1.0]), 0.9)
    torch.testing.assert_close(objective.then.loss.class_weights, weights)
    assert objective.first.loss.class_weights is None
    assert objective.then.loss.divide_by == "batch"
    assert objective.start == 0.4
    for name, value in (("beta", 1.0), ("max_margin", -1), ("scale", "x")):
        with pytest.raises(UserError, match=f"{name} must be a number"):
            deferred_ldam([90, 9, 1], **{name: value})


COUNTS = [90, 9, 1]


def losses_of(objective, logits, target):
    """The loss at the beginning and at the end of training."""
    batch = Batch(logits, target, target)
    return [objective(nn.Identity(), [batch], Progress(step, 10, 0, 1.0)) for step in (0, 9)]


def test_deferred_cross_entropy_is_that_of_torch():
    logits, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 0])
    weights = effective_number_weights(torch.tensor(COUNTS).float(), 0.9999)
    objective = defer(LossObjective(nn.CrossEntropyLoss(label_smoothing=0.1)), COUNTS, start=0.5)
    first, then = losses_of(objective, logits, target)
    torch.testing.assert_close(first, F.cross_entropy(logits, target, label_smoothing=0.1))
    torch.testing.assert_close(then, F.cross_entropy(logits, target, weights, label_smoothing=0.1))
    soft = losses_of(objective, logits, F.one_hot(target, 3).float())
    torch.testing.assert_close(soft, [first, then])


def test_deferred_focal_has_class_weights_in_the_end():
    logits, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 0])
    weights = effective_number_weights(torch.tensor(COUNTS).float(), 0.9999)
    objective = defer(LossObjective(Focal(gamma=1, form="sigmoid")), COUNTS, start=0.5)
    first, then = losses_of(objective, logits, target)
    torch.testing.assert_close(first, Focal(gamma=1, form="sigmoid")(logits, target))
    torch.testing.assert_close(then, Focal(gamma=1, form="sigmoid", class_weights=weights)(logits, target))
    assert list(objective.state_dict()) == []


LOSSES = [
    BalancedSoftmax(COUNTS),
    LogitAdjusted(COUNTS, tau=0.5),
    LADE(COUNTS),
    Seesaw(COUNTS),
    Equalization(COUNTS, gamma=0),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_every_loss_gets_the_weights_of_its_classes_in_the_end(loss):
    logits, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 0])
    weights = effective_number_weights(torch.tensor(COUNTS).float(), 0.9999)[target]
    loss.eval()  # Seesaw counts no samples
    each = copy.deepcopy(loss)
    each.reduction = "none"
    first, then = losses_of(defer(LossObjective(loss), COUNTS, start=0.5), logits, target)
    torch.testing.assert_close(first, each(logits, target).mean())
    torch.testing.assert_close(then, (weights * each(logits, target)).sum() / weights.sum())


def test_mixed_and_smoothed_targets_are_weighted_as_torch_does():
    """Balanced softmax is a cross-entropy of logits plus the logarithm of the prior."""
    logits, target = torch.randn(6, 3), torch.randn(6, 3).softmax(1)
    weights = effective_number_weights(torch.tensor(COUNTS).float(), 0.9999)
    objective = defer(LossObjective(BalancedSoftmax(COUNTS, label_smoothing=0.1)), COUNTS, start=0.5)
    adjusted, size = logits + torch.tensor(COUNTS).log(), (target @ weights).sum()
    expected = F.cross_entropy(adjusted, target, weights, reduction="sum", label_smoothing=0.1) / size
    torch.testing.assert_close(losses_of(objective, logits, target)[1], expected)
    numbers = torch.tensor([0, 1, 2, 0, 1, 0])
    expected = F.cross_entropy(adjusted, numbers, weights, label_smoothing=0.1)
    torch.testing.assert_close(losses_of(objective, logits, numbers)[1], expected)


def test_what_seesaw_counts_goes_on():
    objective, target = defer(LossObjective(Seesaw(COUNTS)), COUNTS, start=0.5).train(), torch.tensor([0, 1, 1])
    losses_of(objective, torch.randn(3, 3), target)
    assert objective.state_dict()["then.loss.loss.seen_counts"].tolist() == [2, 4, 0]


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (LossObjective(WeightedCrossEntropy(COUNTS)), "because it weighs the classes from the beginning"),
        (
            CausalNormObjective(torch.tensor(COUNTS)),
            "CausalNormObjective takes no .* because it minimises more than one loss per image",
        ),
        (deferred_ldam(COUNTS), "it defers its class weights already .--options start FRACTION"),
    ],
)
def test_what_cannot_be_deferred_is_refused(objective, message):
    with pytest.raises(UserError, match=message):
        defer(objective, COUNTS, start=0.5)
