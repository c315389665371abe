import numpy as np
import pytest
import torch

from longtail.heads.kinds import DisAlignHead, align
from longtail.posthoc import DisAlign
from longtail.posthoc.marc import class_weights
from longtail.posthoc.solver.sgd import weighted_cross_entropy


def tensors(case):
    names = ("features", "fc_weight", "fc_bias", "confidence_weight", "confidence_bias", "logit_scale", "logit_bias")
    return {name: torch.from_numpy(case[name]).double() for name in names}


def released(values, scale, shift, direction, offset):
    """The released form is the paper's with its scale one larger."""
    logits = values["features"] @ values["fc_weight"].T + values["fc_bias"]
    confidence = (values["features"] @ direction.flatten() + offset.flatten()).sigmoid().unsqueeze(1)
    return align(logits, confidence, scale.flatten() + 1, shift.flatten())


def test_logits_losses_and_gradients_agree_with_the_authors_code(golden):
    for case in golden("disalign"):
        values = tensors(case)
        names = ("logit_scale", "logit_bias", "confidence_weight", "confidence_bias")
        for number, gamma in enumerate(case["exp_scales"]):
            weights = torch.from_numpy(class_weights(case["class_counts"], gamma))
            np.testing.assert_allclose(weights, case["grw_class_weights"][number], rtol=1e-9)
            leaves = [values[name].clone().requires_grad_() for name in names]
            logits = released(values, *leaves)
            np.testing.assert_allclose(logits.detach(), case["logits"], rtol=1e-7, atol=1e-12)
            target = torch.from_numpy(case["target"])
            mean = weighted_cross_entropy(logits, target, weights, "batch")
            assert mean.item() == pytest.approx(float(case["loss_batch_mean"][number]), rel=1e-7)
            loss = weighted_cross_entropy(logits, target, weights, "weights")
            assert loss.item() == pytest.approx(float(case["loss"][number]), rel=1e-7)
            loss.backward()
            for name, leaf in zip(names, leaves, strict=True):
                expected = case[f"grad_{name}"][number]
                np.testing.assert_allclose(leaf.grad.numpy().ravel(), np.ravel(expected), rtol=1e-6, atol=1e-11)


def test_the_mixture_is_the_formula_of_the_paper():
    logits, s = torch.randn(7, 3), torch.rand(7, 1)
    a, b = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(align(logits, s, a, b), s * (a * logits + b) + (1 - s) * logits)


def test_it_starts_at_the_identity_and_the_release_does_not():
    logits, s = torch.randn(7, 3), torch.rand(7, 1)
    torch.testing.assert_close(align(logits, s, torch.ones(3), torch.zeros(3)), logits)
    torch.testing.assert_close(align(logits, s, torch.ones(3) + 1, torch.zeros(3)), (1 + s) * logits)
    head = DisAlignHead(4, 3)
    features = torch.randn(5, 4)
    torch.testing.assert_close(head(features), head.classifier(features))


def problem(size=300):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), [200, 80, 20])
    features = rng.normal(size=(size, 4)).astype(np.float32)
    logits = (rng.normal(size=(size, 3)) + 1.5 * np.eye(3)[y] + [1.5, 0, -1.5]).astype(np.float32)
    return logits, y, features


@pytest.mark.parametrize("form", ["paper", "release"])
def test_training_lowers_the_loss_and_helps_the_tail(form):
    logits, y, features = problem()
    method = DisAlign(form=form, max_iter=300, batch_size=64).fit(logits, y, features=features)
    tail = y == 2
    before = (logits.argmax(1) == y)[tail].mean()
    after = (method.predict(logits, features) == y)[tail].mean()
    assert after > before + 0.2


def test_the_seed_decides():
    logits, y, features = problem()
    first, second, third = (DisAlign(seed=seed, max_iter=50).fit(logits, y, features=features) for seed in (0, 0, 1))
    assert (first.scale_ == second.scale_).all()
    assert (first.scale_ != third.scale_).any()


def test_a_head_leaves_the_random_state_as_it_is():
    logits, y, features = problem()
    method = DisAlign(max_iter=5).fit(logits, y, features=features)
    linear, before = torch.nn.Linear(4, 3), torch.get_rng_state()
    method.head(linear)
    assert torch.equal(torch.get_rng_state(), before)
