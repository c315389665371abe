import numpy as np
import pytest
import torch

from longtail.losses import BalancedSoftmax


def test_agrees_with_the_authors_code(golden, agree):
    for case in golden("balanced_softmax"):
        target = torch.from_numpy(case["target"])
        loss = BalancedSoftmax(case["class_counts"])
        agree(lambda z, loss=loss, y=target: loss(z, y), case["logits"], case["loss"], case["grad_logits"])
        singles = [loss(z[None], y[None]).item() for z, y in zip(torch.from_numpy(case["logits"]), target, strict=True)]
        np.testing.assert_allclose(singles, case["loss_none"], rtol=1e-9)
        assert sum(singles) == pytest.approx(float(case["loss_sum"]), rel=1e-9)


def test_is_the_formula():
    rng = np.random.default_rng(0)
    counts, logits, target = np.array([500, 40, 3]), rng.normal(size=(8, 3)), rng.integers(3, size=8)
    total = 0.0
    for row, label in zip(logits, target, strict=True):
        total -= np.log(counts[label] * np.exp(row[label]) / (counts * np.exp(row)).sum())
    value = BalancedSoftmax(counts)(torch.from_numpy(logits), torch.from_numpy(target))
    assert value.item() == pytest.approx(total / 8, rel=1e-12)


def test_only_ratios_of_counts_matter():
    logits, target = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3
    first, second = BalancedSoftmax([500, 40, 3])(logits, target), BalancedSoftmax([5000, 400, 30])(logits, target)
    assert first.item() == pytest.approx(second.item(), rel=1e-12)
