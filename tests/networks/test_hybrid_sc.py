import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from longtail.backbones import build_backbone
from longtail.data.loading import Batch
from longtail.heads.kinds import unit
from longtail.losses import SupCon
from longtail.networks import HybridSC
from longtail.networks.hybrid_sc import HybridSCObjective, prototypical
from longtail.networks.objective import Progress

COUNTS = torch.tensor([50, 10, 2, 1])
START, THIRD = Progress(0, 30, 0, 10), Progress(9, 30, 3, 10)


def network(**options):
    torch.manual_seed(0)
    return HybridSC(build_backbone("digits", 1), COUNTS, **options).eval()


def batches(size=6):
    """Two views of images as they come, and a batch of balanced ones."""
    generator = torch.Generator().manual_seed(1)
    labels = [torch.randint(4, (size,), generator=generator) for _ in range(2)]
    images = [torch.randn(size, 1, 8, 8, generator=generator) for _ in range(3)]
    shown = zip(images, (labels[0], labels[0], labels[1]), strict=True)
    return [Batch(image, label, torch.arange(size)) for image, label in shown]


@pytest.mark.parametrize("variant", ["sc", "psc"])
def test_loss_is_the_formula(variant):
    model, views = network(variant=variant), batches()
    loss = HybridSCObjective(COUNTS, temperature=0.2)(model, views, THIRD)
    first, second, balanced = views
    projected = [unit(model.projection(model.backbone(view.images))) for view in (first, second)]
    if variant == "sc":
        contrast = SupCon(temperature=0.2)(torch.stack(projected, 1), first.labels)
    else:
        prototypes = unit(model.prototypes)
        contrast = sum(prototypical(z, first.labels, prototypes, 0.2) for z in projected) / 2
    classifier = F.cross_entropy(model(balanced.images), balanced.labels)
    alpha = 1 - 0.3**2
    torch.testing.assert_close(loss, alpha * contrast + (1 - alpha) * classifier)


@pytest.mark.parametrize("variant", ["sc", "psc"])
def test_the_first_epoch_is_contrast_alone_and_everything_has_a_gradient(variant):
    model, views = network(variant=variant), batches()
    loss = HybridSCObjective(COUNTS)(model, views, START)
    loss.backward()
    views[2].images.zero_()  # the classifier's images do not matter yet
    torch.testing.assert_close(HybridSCObjective(COUNTS)(model, views, START), loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert model.head.weight.grad.abs().max() == 0
    assert model.projection[0].weight.grad.abs().max() > 0


def test_projections_and_prototypes_have_length_one_at_the_start():
    model = network(variant="psc", projection=16)
    projected = model.project(torch.randn(5, 64))
    assert projected.shape == (5, 16)
    for vectors in (projected, model.prototypes):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))
    assert network().prototypes is None


@pytest.mark.parametrize("variant", ["sc", "psc"])
@pytest.mark.parametrize("size", [0.0, 1e4, 1e30])
def test_finite_at_extreme_features(variant, size):
    model = network(variant=variant)
    features = (size * torch.randn(8, 64)).requires_grad_()
    loss = HybridSCObjective(COUNTS)._contrast(model, features, torch.tensor([0, 0, 1, 3]))
    loss.backward()
    assert loss.isfinite()
    assert features.grad.isfinite().all()


def vectors(*shape, seed=0):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


TARGET = torch.tensor([0, 0, 1, 2, 1])


def test_prototypical_is_the_formula():
    features, prototypes = vectors(5, 4), vectors(3, 4, seed=1)
    terms = []
    for z, label in zip(features.numpy(), TARGET.tolist(), strict=True):
        similar = np.exp(prototypes.numpy() @ z / 0.2)
        terms.append(-np.log(similar[label] / (similar.sum() - similar[label])))
    assert prototypical(features, TARGET, prototypes, 0.2).item() == pytest.approx(np.mean(terms), rel=1e-9)


def test_gradients_are_derivatives():
    z, p = vectors(5, 4).requires_grad_(), vectors(3, 4, seed=1).requires_grad_()
    assert gradcheck(lambda z, p: prototypical(z, TARGET, p, 0.3), (z, p))


def test_a_tiny_temperature_is_finite():
    assert prototypical(vectors(5, 4).float(), TARGET, vectors(3, 4).float(), 1e-4).isfinite()
