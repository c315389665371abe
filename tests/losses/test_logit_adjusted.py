import numpy as np
import pytest
import torch

from longtail.losses import LogitAdjusted


def test_agrees_with_the_papers_formula_and_nearly_with_the_released_code(golden, agree):
    """The release adds 1e-12 after the power, which shows where tau is large and a class rare."""
    for case in golden("logit_adjustment"):
        target = torch.from_numpy(case["target"])
        for number, tau in enumerate(case["taus"]):
            loss = LogitAdjusted(case["class_counts"], tau=tau)
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case["train_loss_formula"][number],
                case["train_grad_logits_formula"][number],
            )
            released = loss(torch.from_numpy(case["logits"]), target).item()
            assert released == pytest.approx(case["train_loss"][number], abs=1e-2)


def test_is_the_formula():
    rng = np.random.default_rng(0)
    counts, logits, target = np.array([500, 40, 3]), rng.normal(size=(8, 3)), rng.integers(3, size=8)
    prior = counts / counts.sum()
    total = 0.0
    for row, label in zip(logits, target, strict=True):
        total -= np.log(prior[label] ** 0.7 * np.exp(row[label]) / (prior**0.7 * np.exp(row)).sum())
    value = LogitAdjusted(counts, tau=0.7)(torch.from_numpy(logits), torch.from_numpy(target))
    assert value.item() == pytest.approx(total / 8, rel=1e-12)
