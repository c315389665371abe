import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longtail.data.loading import Batch
from longtail.errors import UserError
from longtail.losses import LDAM, Focal, Seesaw
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


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (LossObjective(Seesaw(COUNTS)), "Seesaw takes no class weights; --defer is for --method softmax, cbs or focal"),
        (CausalNormObjective(torch.tensor(COUNTS)), "CausalNormObjective takes no class weights"),
        (deferred_ldam(COUNTS), "defers its class weights already; set when with --options start FRACTION"),
    ],
)
def test_what_cannot_be_deferred_is_refused(objective, message):
    with pytest.raises(UserError, match=message):
        defer(objective, COUNTS, start=0.5)
