import numpy as np
import pytest
import torch

from longtail.losses import WeightedCrossEntropy


def naive(logits, target, counts, divide_by):
    """The formula, sample by sample."""
    weights = [1 / count for count in counts]
    weights = [len(counts) * weight / sum(weights) for weight in weights]
    total = used = 0.0
    for row, label in zip(logits, target, strict=True):
        total += weights[label] * (np.log(np.exp(row).sum()) - row[label])
        used += weights[label]
    return total / (used if divide_by == "weights" else len(target))


@pytest.mark.parametrize(("divide_by", "suffix"), [("weights", ""), ("batch", "_batch_mean")])
def test_agrees_with_released_code_that_weights_by_frequency(golden, divide_by, suffix):
    """DisAlign's weights with exponent 1 are those of CBW; its bias gives the gradient."""
    for case in golden("disalign"):
        number = case["exp_scales"].tolist().index(1.0)
        loss = WeightedCrossEntropy(case["class_counts"], divide_by=divide_by)
        target = torch.from_numpy(case["target"])
        np.testing.assert_allclose(loss.weights(torch.zeros(1).double()), case["grw_class_weights"][number], rtol=1e-12)
        logits = torch.from_numpy(case["logits"]).requires_grad_()
        value = loss(logits, target)
        assert value.item() == pytest.approx(float(case[f"loss{suffix}"][number]), rel=1e-9)
        if divide_by == "weights":
            value.backward()
            confidence = torch.from_numpy(case["confidence"]).reshape(-1, 1)
            expected = case["grad_logit_bias"][number].ravel()
            np.testing.assert_allclose((confidence * logits.grad).sum(0), expected, atol=1e-9)


@pytest.mark.parametrize("divide_by", ["weights", "batch"])
def test_is_the_formula(divide_by):
    rng = np.random.default_rng(0)
    counts, logits, target = [50, 7, 2], rng.normal(size=(9, 3)), rng.integers(3, size=9)
    value = WeightedCrossEntropy(counts, divide_by=divide_by)(torch.from_numpy(logits), torch.from_numpy(target))
    assert value.item() == pytest.approx(naive(logits, target, counts, divide_by), rel=1e-12)


def test_the_default_divides_as_torch_does():
    logits, target = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3
    loss = WeightedCrossEntropy([50, 7, 2])
    expected = torch.nn.functional.cross_entropy(logits, target, loss.weights(logits))
    assert loss(logits, target).item() == pytest.approx(expected.item(), rel=1e-12)


def test_weights_sum_to_the_number_of_classes():
    weights = WeightedCrossEntropy([5000, 5, 1]).weights(torch.zeros(1))
    assert weights.sum().item() == pytest.approx(3)
    assert (weights[2] / weights[1]).item() == pytest.approx(5)
