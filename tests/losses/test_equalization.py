import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.errors import UserError
from longtail.losses import Equalization


def test_agrees_with_released_code_where_its_draw_is_given(golden, agree):
    """A re-implementation of the softmax form: the authors released a detection loss."""
    for case in golden("equalization_softmax"):
        target = torch.from_numpy(case["target"])
        for number, (gamma, threshold) in enumerate(zip(case["gammas"], case["lambdas"], strict=True)):
            loss = Equalization(case["class_counts"], gamma=gamma, threshold=threshold)
            assert loss.rare.tolist() == case["rare_class_mask"][number].tolist()
            beta = torch.from_numpy(case["drop_mask"][number])
            agree(
                lambda logits, loss=loss, target=target, beta=beta: loss(logits, target, beta),
                case["logits"],
                case["loss"][number],
                case["grad_logits"][number],
            )


def test_is_the_formula():
    rng = np.random.default_rng(0)
    counts, logits, target = np.array([900, 90, 9, 1]), rng.normal(size=(8, 4)), rng.integers(4, size=8)
    beta = rng.random((8, 4)) < 0.5
    total = 0.0
    for i, (row, label) in enumerate(zip(logits, target, strict=True)):
        weights = [1 - beta[i, k] * (counts[k] / 1000 < 0.05) * (k != label) for k in range(4)]
        total -= np.log(np.exp(row[label]) / (weights * np.exp(row)).sum())
    loss = Equalization(counts, threshold=0.05)
    value = loss(torch.from_numpy(logits), torch.from_numpy(target), torch.from_numpy(beta))
    assert value.item() == pytest.approx(total / 8, rel=1e-12)


def test_limits():
    logits, target = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4
    plain = F.cross_entropy(logits, target).item()
    counts = [900, 90, 9, 1]
    assert Equalization(counts, gamma=0, threshold=0.5)(logits, target).item() == pytest.approx(plain, rel=1e-12)
    assert Equalization(counts, gamma=1, threshold=0)(logits, target).item() == pytest.approx(plain, rel=1e-12)
    spared = Equalization(counts, gamma=1, threshold=0.05)
    everything = torch.ones_like(logits, dtype=torch.bool)
    assert spared(logits, target).item() == spared(logits, target, everything).item()


def test_rare_means_a_smaller_share_than_the_threshold():
    assert Equalization([990, 5, 5], threshold=0.005).rare.tolist() == [False, False, False]
    assert Equalization([991, 5, 4], threshold=0.005).rare.tolist() == [False, False, True]


@pytest.mark.parametrize(("name", "rare", "rare_by_lvis"), [("cifar10", 1, 0), ("cifar100", 52, 30)])
def test_the_default_threshold_is_that_of_cifar(shared, name, rare, rare_by_lvis):
    counts = json.loads((shared / "golden" / "class_counts" / f"{name}_exp_ir100.json").read_text())
    assert Equalization(counts).threshold == 0.005
    assert Equalization(counts).rare.sum().item() == rare
    assert Equalization(counts, threshold=0.00177).rare.sum().item() == rare_by_lvis


def test_every_element_is_drawn_by_itself_from_the_global_generator():
    loss = Equalization([900, 90, 9, 1], gamma=0.7, threshold=0.05)
    logits = torch.zeros(4000, 4, requires_grad=True)
    loss(logits, torch.zeros(4000, dtype=torch.int64)).backward()
    dropped = logits.grad == 0
    assert not dropped[:, :2].any()
    assert dropped[:, 2:].float().mean(0).tolist() == pytest.approx([0.7, 0.7], abs=0.03)
    assert (dropped[:, 2] & dropped[:, 3]).float().mean().item() == pytest.approx(0.49, abs=0.03)
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(loss(logits, torch.zeros(4000, dtype=torch.int64)).item())
    assert values[0] == values[1] != values[2]


def test_a_draw_of_another_shape_is_named():
    with pytest.raises(UserError, match=r"beta must have the shape of the logits, \(2, 4\), not \(4,\)"):
        Equalization([9, 5, 2, 1])(torch.zeros(2, 4), torch.tensor([0, 1]), torch.ones(4))
