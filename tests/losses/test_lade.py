import numpy as np
import pytest
import torch

from longtail.losses import LADE


def test_agrees_with_the_authors_code(golden, agree):
    for case in golden("lade"):
        target = torch.from_numpy(case["target"])
        plain = LADE(case["class_counts"], alpha=0)
        agree(
            lambda z, loss=plain, y=target: loss(z, y),
            case["logits"],
            case["prior_ce_loss"],
            case["prior_ce_grad_logits"],
        )
        pairs = zip(case["remine_lambdas"], case["alphas"], strict=True)
        for number, (remine_lambda, alpha) in enumerate(pairs):
            loss = LADE(case["class_counts"], alpha=alpha, remine_lambda=remine_lambda)
            agree(
                lambda z, loss=loss, y=target: loss.regulariser(loss.samples(z, y)),
                case["logits"],
                case["lade_loss"][number],
                case["lade_grad_logits"][number],
            )
            agree(
                lambda z, loss=loss, y=target: loss(z, y),
                case["logits"],
                case["total_loss"][number],
                case["total_grad_logits"][number],
            )


def test_is_the_formula():
    rng = np.random.default_rng(0)
    counts, logits = np.array([500, 40, 3, 2]), rng.normal(size=(8, 4))
    target = np.array([0, 0, 1, 0, 1, 2, 0, 2])  # class 3 is absent
    prior = counts / counts.sum()
    total = 0.0
    for row, label in zip(logits, target, strict=True):
        total -= np.log(prior[label] * np.exp(row[label]) / (prior * np.exp(row)).sum()) / 8
    for c in range(4):
        own = logits[target == c, c]
        ratio = np.log(np.mean(np.exp(logits[:, c]) / prior[c] / 4))
        total -= 0.3 * prior[c] * ((own.mean() if len(own) else 0) - ratio - 0.2 * ratio**2)
    loss = LADE(counts, alpha=0.3, remine_lambda=0.2)
    # The released 1e-9 inside the logarithms is what is left of a difference.
    assert loss(torch.from_numpy(logits), torch.from_numpy(target)).item() == pytest.approx(total, abs=1e-6)
