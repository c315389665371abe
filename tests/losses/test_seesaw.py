import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.losses import Seesaw


def seesaw(case, **settings):
    """The loss of a golden case, with the counts it starts from."""
    loss = Seesaw(case["class_counts"], **settings)
    loss.seen_counts.copy_(torch.from_numpy(case["cum_samples_before"]))
    return loss


def test_agrees_with_released_code(golden, agree):
    """mmpretrain's: the batch is counted before its loss is taken, and no gradient goes through C."""
    for case in golden("seesaw"):
        target = torch.from_numpy(case["target"])
        for number, (p, q) in enumerate(zip(case["p"], case["q"], strict=True)):
            loss = seesaw(case, p=p, q=q)
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case["loss"][number],
                case["grad_logits"][number],
            )
            assert loss.seen_counts.tolist() == case["cum_samples_after"].tolist()
            rows = zip(torch.from_numpy(case["logits"]), target, strict=True)
            singles = [loss.eval()(z[None], y[None]).item() for z, y in rows]
            np.testing.assert_allclose(singles, case["loss_none"][number], rtol=1e-9)


def test_a_second_batch_goes_on_from_the_counts_of_the_first(golden, agree):
    for case in golden("seesaw"):
        loss = seesaw(case)
        loss(torch.from_numpy(case["logits"]), torch.from_numpy(case["target"]))
        target = torch.from_numpy(case["target_step2"])
        agree(lambda z, loss=loss, y=target: loss(z, y), case["logits_step2"], case["loss_step2"])
        assert loss.seen_counts.tolist() == case["cum_samples_after_step2"].tolist()


def test_is_the_formula():
    rng = np.random.default_rng(0)
    logits, target, seen = 3 * rng.normal(size=(8, 3)), rng.integers(3, size=8), np.array([300, 20, 0])
    counts = np.maximum(seen, 1)
    total = 0.0
    for row, label in zip(logits, target, strict=True):
        p = np.exp(row) / np.exp(row).sum()
        denominator = 0.0
        for j in range(3):
            m = min(1, (counts[j] / counts[label]) ** 0.8) if j != label else 1
            c = max(1, (p[j] / max(p[label], 0.01)) ** 2) if j != label else 1
            denominator += m * c * np.exp(row[j])
        total -= np.log(np.exp(row[label]) / denominator)
    loss = Seesaw([1, 1, 1]).eval()
    loss.seen_counts.copy_(torch.from_numpy(seen))
    value = loss(torch.from_numpy(logits), torch.from_numpy(target))
    assert value.item() == pytest.approx(total / 8, rel=1e-12)


def test_the_gradient_is_that_of_fixed_factors():
    logits, target = 3 * torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3
    loss = Seesaw([9, 9, 9]).eval()
    loss.seen_counts.copy_(torch.tensor([300, 20, 1]))
    first, second = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss(first, target).backward()
    F.cross_entropy(second + loss._log_factors(logits, target), target).backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_evaluation_does_not_count():
    loss, logits, target = Seesaw([5, 2, 1]), torch.randn(3, 3), torch.tensor([0, 1, 1])
    loss(logits, target)
    loss.eval()
    loss(logits, target)
    assert loss.seen_counts.tolist() == [1, 2, 0]
    loss.train()
    loss(logits, target)
    assert loss.seen_counts.tolist() == [2, 4, 0]


def test_counts_are_saved_and_loaded():
    first, logits, target = Seesaw([5, 2, 1]), torch.randn(4, 3), torch.tensor([0, 0, 0, 1])
    first(logits, target)
    second = Seesaw([5, 2, 1])
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(logits, target), first(logits, target))
    assert second.seen_counts.tolist() == [6, 2, 0]
