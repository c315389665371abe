import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.heads.kinds import CosineHead
from longtail.losses import LDAM
from longtail.losses.class_balanced import effective_number_weights


def settings(case):
    """(number, max_margin, scale) of the settings stored."""
    return [(number, *pair) for number, pair in enumerate(zip(case["max_m"], case["s"], strict=True))]


def test_agrees_with_the_authors_code(golden, agree):
    for case in golden("ldam"):
        target = torch.from_numpy(case["target"])
        for number, max_margin, scale in settings(case):
            loss = LDAM(case["class_counts"], max_margin=max_margin, scale=scale)
            np.testing.assert_allclose(loss.margins(torch.zeros(1).double()), case["margins"][number], rtol=1e-12)
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case["loss"][number],
                case["grad_logits"][number],
            )


@pytest.mark.parametrize(("divide_by", "suffix"), [("weights", ""), ("batch", "_batch_mean")])
def test_the_deferred_phase_agrees_with_the_authors_code(golden, agree, divide_by, suffix):
    """Their code divides by the sum of the weights, which is the default; the formula by the batch size."""
    for case in golden("ldam"):
        target, counts = torch.from_numpy(case["target"]), torch.from_numpy(case["class_counts"])
        weights = effective_number_weights(counts.double(), 0.9999)
        np.testing.assert_allclose(weights, case["drw_class_weights"], rtol=1e-9)
        for number, max_margin, scale in settings(case):
            options = {"max_margin": max_margin, "scale": scale, "class_weights": weights}
            loss = LDAM(counts, **options, **({} if divide_by == "weights" else {"divide_by": "batch"}))
            agree(
                lambda logits, loss=loss, target=target: loss(logits, target),
                case["logits"],
                case[f"loss_drw{suffix}"][number],
                case[f"grad_logits_drw{suffix}"][number],
            )


def test_head_and_loss_together_agree_with_the_authors_code(golden):
    for case in golden("ldam"):
        for number, max_margin, scale in settings(case):
            head = CosineHead(case["features"].shape[1], len(case["class_counts"]), scale=scale).double()
            vectors = head.linear.parametrizations.weight.original
            with torch.no_grad():
                vectors.copy_(torch.from_numpy(case["weight"]).T)
            features = torch.from_numpy(case["features"]).requires_grad_()
            logits = head(features)
            np.testing.assert_allclose(logits.detach(), scale * case["logits"], rtol=1e-9, atol=1e-12)
            loss = LDAM(case["class_counts"], max_margin=max_margin, scale=scale, scaled=True)
            value = loss(logits, torch.from_numpy(case["target"]))
            value.backward()
            assert value.item() == pytest.approx(case["loss"][number], rel=1e-9)
            np.testing.assert_allclose(features.grad, case["grad_features"][number], atol=1e-9)
            np.testing.assert_allclose(vectors.grad.T, case["grad_weight"][number], atol=1e-9)


def test_is_the_formula():
    rng = np.random.default_rng(0)
    counts, cosines, target = [500, 40, 3], rng.uniform(-1, 1, size=(8, 3)), rng.integers(3, size=8)
    margins = np.array([n**-0.25 for n in counts])
    margins *= 0.4 / margins.max()
    total = 0.0
    for row, label in zip(cosines, target, strict=True):
        shifted = [10 * (c - margins[label] * (k == label)) for k, c in enumerate(row)]
        total += np.log(np.exp(shifted).sum()) - shifted[label]
    value = LDAM(counts, max_margin=0.4, scale=10)(torch.from_numpy(cosines), torch.from_numpy(target))
    assert value.item() == pytest.approx(total / 8, rel=1e-12)


def test_limits():
    cosines, target = torch.rand(8, 3, dtype=torch.float64) * 2 - 1, torch.arange(8) % 3
    counts = [500, 40, 3]
    without_margin = LDAM(counts, max_margin=0)(cosines, target).item()
    assert without_margin == pytest.approx(F.cross_entropy(30 * cosines, target).item(), rel=1e-12)
    equal_weights = LDAM(counts, class_weights=[2.0, 2.0, 2.0])(cosines, target).item()
    assert equal_weights == pytest.approx(LDAM(counts)(cosines, target).item(), rel=1e-12)
    assert LDAM([9, 9, 9], max_margin=0.3).margins(cosines).tolist() == pytest.approx([0.3] * 3)
    scaled = LDAM(counts, scaled=True)(30 * cosines, target).item()
    assert scaled == pytest.approx(LDAM(counts)(cosines, target).item(), rel=1e-12)
