import numpy as np
import pytest
import torch

from longtail.errors import UserError
from longtail.losses import Focal
from longtail.losses.class_balanced import effective_number_weights


@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
def test_agrees_with_released_code(golden, agree, form):
    for case in golden("focal"):
        target = torch.from_numpy(case["target"])
        for number, gamma in enumerate(case["gammas"]):
            loss = Focal(gamma=gamma, form=form)
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case[f"{form}_loss"][number],
                case[f"{form}_grad_logits"][number],
            )


def test_the_gradient_goes_through_the_factor_unlike_where_it_is_cut(golden):
    for case in golden("focal"):
        for number, gamma in enumerate(case["gammas"]):
            logits = torch.from_numpy(case["logits"]).requires_grad_()
            value = Focal(gamma=gamma)(logits, torch.from_numpy(case["target"]))
            value.backward()
            assert value.item() == pytest.approx(case["softmax_detached_loss"][number], rel=1e-9)
            cut = case["softmax_detached_grad_logits"][number]
            assert np.allclose(logits.grad, cut, atol=1e-7) == (gamma == 0)


def test_weighted_sigmoid_form_agrees_with_released_code(golden, agree):
    for case in golden("focal"):
        target = torch.from_numpy(case["target"])
        for number, gamma in enumerate(case["gammas"]):
            loss = Focal(gamma=gamma, form="sigmoid", class_weights=case["sigmoid_drw_class_weights"])
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case["sigmoid_drw_loss"][number],
                case["sigmoid_drw_grad_logits"][number],
            )


def test_class_weights_stay_outside_the_probability(golden, agree):
    """The definition; LDAM-DRW's release weights the cross-entropy before it forms p."""
    for case in golden("cb_focal"):
        target, counts = torch.from_numpy(case["target"]), torch.from_numpy(case["class_counts"]).double()
        for number, (beta, gamma) in enumerate(zip(case["betas"], case["gammas"], strict=True)):
            loss = Focal(gamma=gamma, class_weights=effective_number_weights(counts, beta))
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case["softmax_weighted_outside_loss"][number],
                case["softmax_weighted_outside_grad_logits"][number],
            )
        if len(set(case["class_counts"])) > 1:
            inside = case["softmax_repo_loss"][number]
            assert loss(torch.from_numpy(case["logits"]), target).item() != pytest.approx(inside, rel=1e-3)


def test_is_the_formula():
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(7, 4)), rng.integers(4, size=7)
    softmax = sigmoid = 0.0
    for row, label in zip(logits, target, strict=True):
        p = np.exp(row[label]) / np.exp(row).sum()
        softmax -= (1 - p) ** 1.5 * np.log(p) / 7
        for k, z in enumerate(row):
            right = 1 / (1 + np.exp(-z if k == label else z))
            sigmoid -= (1 - right) ** 1.5 * np.log(right) / 7
    arguments = torch.from_numpy(logits), torch.from_numpy(target)
    assert Focal(gamma=1.5)(*arguments).item() == pytest.approx(softmax, rel=1e-12)
    assert Focal(gamma=1.5, form="sigmoid")(*arguments).item() == pytest.approx(sigmoid, rel=1e-12)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0])
def test_the_gradient_of_sure_answers_falls_to_zero(gamma):
    """Where p rounds to 1 the power's own slope is infinite for gamma below 1."""
    sizes = []
    for lead in (5.0, 20.0, 100.0, 1e4):
        logits = torch.tensor([[lead, 0.0, -1.0]], requires_grad=True)
        Focal(gamma=gamma)(logits, torch.tensor([0])).backward()
        sizes.append(logits.grad.abs().max().item())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_another_number_of_weights_is_named():
    with pytest.raises(
        UserError, match=r"logits of shape \(1, 3\) have 3 classes in dimension 1, but Focal was built for 2"
    ):
        Focal(class_weights=[1.0, 2.0])(torch.zeros(1, 3), torch.tensor([0]))
