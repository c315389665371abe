import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from longtail.backbones import build_backbone
from longtail.backbones.weights import load_backbone
from longtail.data.loading import Batch
from longtail.networks import BBN
from longtail.networks.bbn import BBNObjective, cumulative_alpha, mixed_loss
from longtail.networks.objective import Progress

COUNTS = torch.tensor([50, 10, 2, 1])


def golden_head(on_features, case):
    """A network with the head of a golden case, which has features of both branches."""
    model = on_features(BBN, {"features": case["features_a"], "class_counts": case["class_counts"]})
    model.head.weight.data = torch.from_numpy(case["fc_weight"])
    model.head.bias.data = torch.from_numpy(case["fc_bias"])
    return model


def test_alpha_agrees_with_the_authors_code(golden):
    """Their epochs count from 1, ours from 0; 90 and 180 epochs are divided by 100 and 200 as theirs."""
    for case in golden("bbn"):
        alphas = [cumulative_alpha(epoch - 1, case["params"]["max_epoch"]) for epoch in case["epochs"].tolist()]
        assert alphas == pytest.approx(case["alpha"].tolist(), rel=1e-12)


def test_mixed_logits_loss_and_gradients_agree_with_the_authors_code(golden, on_features):
    for case in golden("bbn"):
        model = golden_head(on_features, case)
        targets = torch.from_numpy(case["target_a"]), torch.from_numpy(case["target_b"])
        for number, epoch in enumerate(case["mix_epochs"].tolist()):
            alpha = cumulative_alpha(epoch - 1, case["params"]["max_epoch"])
            f = torch.from_numpy(case["features_a"]).requires_grad_()
            g = torch.from_numpy(case["features_b"]).requires_grad_()
            logits = model.mix(f, g, alpha)
            loss = mixed_loss(logits, *targets, alpha)
            loss.backward()
            np.testing.assert_allclose(logits.detach(), case["logits"][number], atol=1e-9)
            assert loss.item() == pytest.approx(float(case["loss"][number]), rel=1e-9)
            np.testing.assert_allclose(f.grad, case["grad_features_a"][number], atol=1e-9)
            np.testing.assert_allclose(g.grad, case["grad_features_b"][number], atol=1e-9)


def test_test_logits_agree_with_the_authors_code(golden, on_features):
    for case in golden("bbn"):
        model = golden_head(on_features, case)
        f, g = torch.from_numpy(case["features_a"]), torch.from_numpy(case["features_b"])
        np.testing.assert_allclose(model.head(torch.cat([f, g], 1)).detach(), case["test_logits"], atol=1e-9)
        np.testing.assert_allclose(model.mix(f, g, 0.5).detach(), case["test_logits"], atol=1e-9)


def batch(size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 1, 8, 8, generator=generator)
    return Batch(images, torch.randint(4, (size,), generator=generator), torch.arange(size))


def network():
    torch.manual_seed(0)
    return BBN(build_backbone("digits", 1), COUNTS)


def test_loss_is_the_formula():
    model = network().eval()  # batch-norm's statistics stand still, so that passes can be repeated
    uniform, reverse = batch(seed=1), batch(seed=2)
    loss = BBNObjective(COUNTS)(model, [uniform, reverse], Progress(step=7, steps=20, epoch=3, epochs=10))
    alpha = 1 - 0.3**2
    f = model.features(uniform.images)[:, :64]
    g = model.features(reverse.images)[:, 64:]
    logits = torch.cat([2 * alpha * f, 2 * (1 - alpha) * g], 1) @ model.head.weight.T + model.head.bias
    log_p = logits.log_softmax(1)
    rows = torch.arange(6)
    expected = -(alpha * log_p[rows, uniform.labels] + (1 - alpha) * log_p[rows, reverse.labels]).mean()
    torch.testing.assert_close(loss, expected)


def test_gradient_is_the_derivative(on_features):
    case = {"features": np.zeros((1, 3)), "class_counts": np.array([5, 1])}
    model = on_features(BBN, case)
    targets = torch.tensor([0, 1]), torch.tensor([1, 1])
    f, g = torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda a, b: mixed_loss(model.mix(a, b, 0.7), *targets, 0.7), (f, g))


def test_at_alpha_one_only_the_conventional_branch_learns_and_at_zero_only_the_other():
    model = network()
    uniform, reverse = batch(seed=1), batch(seed=2)
    BBNObjective(COUNTS)(model, [uniform, reverse], Progress(0, 20, 0, 10)).backward()
    gradients = [parameter.grad for parameter in model.rebalancing_block.parameters()]
    assert all(gradient.abs().max() == 0 for gradient in gradients)  # there, as distributed training asks
    assert model.backbone.layers[6].weight.grad.abs().max() > 0
    model.zero_grad()
    logits = model.mix(model.conventional(uniform.images), model.rebalancing(reverse.images), 0.0)
    loss = mixed_loss(logits, uniform.labels, reverse.labels, 0.0)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(logits, reverse.labels))
    assert model.backbone.layers[6].weight.grad.abs().max() == 0
    assert model.rebalancing_block[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("name", "block"), [("resnet8", "layer3.0"), ("resnet32", "layer3.4"), ("resnet10", "layer4.0")]
)
def test_the_last_block_is_there_twice_with_weights_of_its_own(name, block):
    model = BBN(build_backbone(name), COUNTS)
    original = model.backbone.get_submodule(block)
    assert model.backbone.last_block is original
    pairs = list(zip(original.named_parameters(), model.rebalancing_block.named_parameters(), strict=True))
    for (first, a), (second, b) in pairs:
        assert (first, a.shape) == (second, b.shape)
        if a.ndim == 4:
            assert not torch.equal(a, b)
            assert b.std().item() == pytest.approx(a.std().item(), rel=0.05)


def test_published_weights_reach_both_branches_but_a_saved_network_keeps_its_own(tmp_path):
    source = build_backbone("resnet8")
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model = BBN(build_backbone("resnet8"), COUNTS)
    load_backbone(model.backbone, tmp_path / "w.pth")
    for block in (model.backbone.last_block, model.rebalancing_block):
        assert torch.equal(block.conv1.weight, source.last_block.conv1.weight)
    trained = BBN(build_backbone("resnet8"), COUNTS)
    model.load_state_dict(trained.state_dict())
    assert torch.equal(model.rebalancing_block.conv1.weight, trained.rebalancing_block.conv1.weight)
    assert not torch.equal(model.rebalancing_block.conv1.weight, model.backbone.last_block.conv1.weight)


def test_finite_at_extreme_features():
    model = network()
    f = (1e4 * torch.randn(4, 64)).requires_grad_()
    logits = model.mix(f, -f, 0.3)
    loss = mixed_loss(logits, torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 3, 3]), 0.3)
    loss.backward()
    assert loss.isfinite()
    assert f.grad.isfinite().all()
