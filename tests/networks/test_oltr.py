import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import functional_call

from longtail.backbones import build_backbone
from longtail.data.loading import Batch
from longtail.heads.kinds import unit_head
from longtail.networks import OLTR
from longtail.networks.objective import Progress
from longtail.networks.oltr import ClassMeans, OLTRObjective, centroid_loss

COUNTS = torch.tensor([50, 10, 2, 1])
WEIGHT = "parametrizations.weight.original"


def test_cosine_head_agrees_with_the_authors_code(golden):
    for case in golden("oltr_cosnorm"):
        head = unit_head(*case["weight"].shape[::-1], scale=case["params"]["scale"]).double()
        head.load_state_dict({WEIGHT: torch.from_numpy(case["weight"])})
        x = torch.from_numpy(case["features"]).requires_grad_()
        logits = head(x / (1 + x.norm(dim=1, keepdim=True)))
        F.cross_entropy(logits, torch.from_numpy(case["target"])).backward()
        np.testing.assert_allclose(logits.detach(), case["logits"], atol=1e-9)
        np.testing.assert_allclose(x.grad, case["grad_features"], atol=1e-9)
        np.testing.assert_allclose(dict(head.named_parameters())[WEIGHT].grad, case["grad_weight"], atol=1e-9)


def with_memory(on_features, case):
    """The network of a golden case, its memory on."""
    classes = len(case["centroids"])
    model = on_features(OLTR, {"features": case["features"], "class_counts": np.ones(classes)})
    model.centroids.data = torch.from_numpy(case["centroids"])
    for name in ("hallucinator", "selector"):
        layer = model.get_submodule(name)
        layer.weight.data = torch.from_numpy(case[f"{name}_weight"])
        layer.bias.data = torch.from_numpy(case[f"{name}_bias"])
    model.head.load_state_dict({WEIGHT: torch.from_numpy(case["cosnorm_weight"])})
    model.memory_on = True
    return model


def test_meta_embedding_agrees_with_the_authors_code(golden, on_features):
    for case in golden("oltr_meta_embedding"):
        model = with_memory(on_features, case)
        x = torch.from_numpy(case["features"]).requires_grad_()
        logits = model(x)  # the attention starts as the identity
        loss = F.cross_entropy(logits, torch.from_numpy(case["target"]))
        loss.backward()
        np.testing.assert_allclose(logits.detach(), case["logits"], atol=1e-9)
        np.testing.assert_allclose(model.infused(x).detach(), case["infused_feature"], atol=1e-9)
        assert loss.item() == pytest.approx(float(case["ce_loss"]), rel=1e-9)
        np.testing.assert_allclose(x.grad, case["grad_features"], atol=1e-9)
        assert model.centroids.grad is None  # the memory is read, not taught, by the cross-entropy


def test_centroid_loss_agrees_with_the_authors_code(golden):
    """Value and gradient of the features as released; of the centroids the derivative, not their own update."""
    for case in golden("oltr_disc_centroids"):
        features = torch.from_numpy(case["features"]).requires_grad_()
        centroids = torch.from_numpy(case["centroids"]).requires_grad_()
        loss = centroid_loss(features, torch.from_numpy(case["target"]), centroids)
        loss.backward()
        assert loss.item() == pytest.approx(float(case["loss"]), rel=1e-9)
        np.testing.assert_allclose(features.grad, case["grad_features"], atol=1e-9)
        np.testing.assert_allclose(centroids.grad, case["grad_centroids_exact"], atol=1e-9)


def random_memory(on_features, width=5, classes=4):
    torch.manual_seed(0)
    case = {"features": np.zeros((1, width)), "class_counts": np.arange(classes, 0, -1)}
    model = on_features(OLTR, case)
    torch.nn.init.normal_(model.centroids)
    model.memory_on = True
    return model, torch.randn(6, width, dtype=torch.float64)


def test_logits_are_the_formula(on_features):
    model, x = random_memory(on_features)
    w = dict(model.head.named_parameters())[WEIGHT]
    with torch.no_grad():
        for row, logits in zip(x, model(x), strict=True):
            nearest = min(float((row - c).norm()) for c in model.centroids)
            share = model.hallucinator(row).exp() / model.hallucinator(row).exp().sum()
            remembered = sum(s * c for s, c in zip(share, model.centroids, strict=True))
            v = 10 / nearest * (row + torch.tanh(model.selector(row)) * remembered)
            expected = [16 * float(v @ k / k.norm() / (1 + v.norm())) for k in w]
            np.testing.assert_allclose(logits, expected, rtol=1e-9)


def naive_centroid_loss(features, target, centroids):
    attract = repel = 0.0
    for f, label in zip(features, target, strict=True):
        for j, c in enumerate(centroids):
            if j == label:
                attract += ((f - c) ** 2).sum() / 2 / len(features)
            else:
                repel += ((f - c) ** 2).sum() / len(features) / len(centroids)
    return attract + 0.01 * max(0.0, 10 - repel)


@pytest.mark.parametrize("size", [0.3, 3.0])  # with and without the second term
def test_centroid_loss_is_the_formula(size):
    rng = np.random.default_rng(0)
    features, centroids, target = size * rng.normal(size=(6, 5)), rng.normal(size=(4, 5)), np.array([0, 0, 1, 3, 3, 3])
    loss = centroid_loss(*(torch.from_numpy(array) for array in (features, target, centroids)))
    assert loss.item() == pytest.approx(naive_centroid_loss(features, target, centroids), rel=1e-9)


def test_gradients_are_derivatives(on_features):
    model, x = random_memory(on_features)
    target = torch.tensor([0, 0, 1, 3, 3, 3])
    assert gradcheck(lambda f, c: centroid_loss(f, target, c), (x.requires_grad_(), model.centroids))
    trained = {n: p for n, p in model.named_parameters() if n.startswith(("hallucinator", "selector", "head"))}

    def logits(x, *parameters):
        return functional_call(model, dict(zip(trained, parameters, strict=True)), (x,))

    assert gradcheck(logits, (x, *trained.values()))


def test_a_feature_on_its_centroid_and_extreme_ones_are_finite(on_features):
    model, x = random_memory(on_features)
    model = model.float()
    on_centroid = model.centroids.detach().clone()
    rows = torch.stack([on_centroid[0], torch.zeros(5), 1e4 * x[0].float(), -1e15 * x[1].float()]).requires_grad_()
    target = torch.tensor([0, 1, 2, 2])
    logits = model(rows)
    (F.cross_entropy(logits, target) + 0.01 * centroid_loss(rows, target, model.centroids)).backward()
    assert logits.isfinite().all()
    assert logits.abs().max() <= 16.001
    for gradient in (rows.grad, *(p.grad for p in model.parameters() if p.grad is not None)):
        assert gradient.isfinite().all()
    model.centroids.data.zero_()
    assert model(torch.zeros(1, 5)).isfinite().all()  # nothing is anywhere


def network():
    torch.manual_seed(0)
    return OLTR(build_backbone("digits", 1), COUNTS, grid=3)


def batch(labels=(0, 0, 1, 2, 3, 0)):
    images = torch.randn(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(images, torch.tensor(labels), torch.arange(len(labels)))


def test_the_first_half_is_a_plain_classifier_that_keeps_class_means():
    model = network().eval()
    objective, shown = OLTRObjective(COUNTS), batch()
    loss = objective(model, [shown], Progress(4, 10, 0, 2))
    direct = model.backbone(shown.images)
    torch.testing.assert_close(loss, F.cross_entropy(model.hallucinator(direct), shown.labels))
    torch.testing.assert_close(model(shown.images), model.hallucinator(direct))
    torch.testing.assert_close(model.class_means.means()[0], direct[shown.labels == 0].mean(0))
    assert not model.memory_on
    assert model.centroids.abs().max() == 0


def test_the_memory_starts_from_the_class_means_and_only_once():
    model, objective = network().eval(), OLTRObjective(COUNTS)
    objective(model, [batch()], Progress(4, 10, 0, 2))
    means = model.class_means.means()
    loss = objective(model, [batch()], Progress(5, 10, 1, 2))
    assert torch.equal(model.centroids, means)
    direct = model.direct_features(batch().images)
    expected = F.cross_entropy(model(batch().images), batch().labels)
    torch.testing.assert_close(loss, expected + 0.01 * centroid_loss(direct, batch().labels, means))
    model.centroids.data += 1
    objective(model, [batch()], Progress(6, 10, 1, 2))
    assert torch.equal(model.centroids, means + 1)
    assert torch.equal(model.class_means.means(), means)


def test_the_switch_is_saved_with_the_weights():
    model, other = network().eval(), network().eval()
    model.switch_memory_on()
    other.load_state_dict(model.state_dict())
    assert other.memory_on
    shown = batch().images
    torch.testing.assert_close(other(shown), model(shown))
    other.load_state_dict(network().state_dict())
    assert not other.memory_on


SEEN = torch.tensor([20, 4, 1, 3])


def test_means_are_the_formula():
    """Class by class: each image leaves 1 - 1/n of what was there; the start is corrected for."""
    rng = np.random.default_rng(0)
    running = ClassMeans(SEEN, 3).double()
    sums, weights = np.zeros((4, 3)), np.zeros(4)
    for _ in range(5):
        labels = rng.integers(3, size=6)  # class 3 never comes
        features = rng.normal(size=(6, 3))
        running.add(torch.from_numpy(features), torch.from_numpy(labels))
        for c in range(4):
            own = features[labels == c]
            if len(own):
                keep = (1 - 1 / int(SEEN[c])) ** len(own)
                sums[c] = keep * sums[c] + (1 - keep) * own.mean(0)
                weights[c] = keep * weights[c] + 1 - keep
        expected = sums / np.where(weights > 0, weights, 1)[:, None]
        np.testing.assert_allclose(running.means(), expected, rtol=1e-6)
    assert running.means()[3].abs().max() == 0


def test_constant_features_and_classes_of_one_image():
    running = ClassMeans(SEEN, 2)
    for value in (1.0, 5.0):
        running.add(torch.tensor([[7.0, -7.0], [value, value]]), torch.tensor([0, 2]))
    torch.testing.assert_close(running.means()[0], torch.tensor([7.0, -7.0]))
    assert running.means()[2].tolist() == [5.0, 5.0]  # the latest


def test_half_precision_and_extreme_features():
    running = ClassMeans(SEEN, 2)
    running.add(torch.full((2, 2), 1e30), torch.tensor([0, 0]))
    running.add(torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor([2, 2]))
    assert running.means().isfinite().all()
