import numpy as np
import pytest
import torch

from longtail.losses import ClassBalanced
from longtail.losses.class_balanced import effective_number_weights


@pytest.mark.parametrize(("divide_by", "suffix"), [("weights", ""), ("batch", "_batch_mean")])
def test_softmax_form_agrees_with_both_releases(golden, agree, divide_by, suffix):
    """The authors divide by the batch size, LDAM-DRW's copy by the sum of the weights."""
    for case in golden("class_balanced"):
        target = torch.from_numpy(case["target"])
        for number, beta in enumerate(case["betas"]):
            loss = ClassBalanced(case["class_counts"], beta=beta, divide_by=divide_by)
            np.testing.assert_allclose(loss.weights(torch.zeros(1).double()), case["class_weights"][number], rtol=1e-9)
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case[f"loss{suffix}"][number],
                case[f"grad_logits{suffix}"][number],
            )


def test_the_default_is_the_authors_division(golden):
    assert ClassBalanced([3, 1]).divide_by == "batch"
    case = golden("class_balanced")[1]
    value = ClassBalanced(case["class_counts"])(torch.from_numpy(case["logits"]), torch.from_numpy(case["target"]))
    assert value.item() == pytest.approx(case["loss_batch_mean"][case["betas"].tolist().index(0.9999)], rel=1e-9)


def test_focal_form_agrees_with_the_authors_code(golden, agree):
    for case in golden("cb_focal"):
        target = torch.from_numpy(case["target"])
        for number, (beta, gamma) in enumerate(zip(case["betas"], case["gammas"], strict=True)):
            loss = ClassBalanced(case["class_counts"], form="focal", beta=beta, gamma=gamma)
            assert case["sigmoid_loss"][number] == pytest.approx(case["sigmoid_loss_tf"][number])
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case["sigmoid_loss"][number],
                case["sigmoid_grad_logits"][number],
            )


def test_sigmoid_form_is_the_formula():
    rng = np.random.default_rng(0)
    counts, logits, target = np.array([500, 20, 1]), rng.normal(size=(7, 3)), rng.integers(3, size=7)
    weights = (1 - 0.99) / (1 - 0.99**counts)
    weights *= 3 / weights.sum()
    total = 0.0
    for row, label in zip(logits, target, strict=True):
        for k, z in enumerate(row):
            p = 1 / (1 + np.exp(-z))
            total -= weights[label] * np.log(p if k == label else 1 - p)
    value = ClassBalanced(counts, form="sigmoid", beta=0.99)(torch.from_numpy(logits), torch.from_numpy(target))
    assert value.item() == pytest.approx(total / 7, rel=1e-12)


def test_weights_keep_their_digits_in_float32():
    counts = torch.tensor([5000, 100, 10, 1])
    single = effective_number_weights(counts.float(), 0.9999)
    double = effective_number_weights(counts.double(), 0.9999)
    np.testing.assert_allclose(single, double, rtol=1e-6)


def test_deferred_weights_are_those_of_ldam_drw(golden):
    for case in golden("class_balanced"):
        counts = torch.from_numpy(case["class_counts"]).double()
        np.testing.assert_allclose(effective_number_weights(counts, 0.0), case["drw_weights_epoch159"], rtol=1e-12)
        np.testing.assert_allclose(effective_number_weights(counts, 0.9999), case["drw_weights_epoch160"], rtol=1e-9)
