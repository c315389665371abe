import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from longtail.networks.contrast import SupCon, prototypical
from longtail.networks.vectors import unit


def test_supcon_agrees_with_the_authors_code(golden):
    """Where their base temperature is the temperature: the loss without an extra factor."""
    checked = 0
    for case in golden("supcon"):
        pairs = zip(case["temperatures"], case["base_temperatures"], strict=True)
        for number, (temperature, base) in enumerate(pairs):
            features = torch.from_numpy(case["features"]).requires_grad_()
            loss = SupCon(float(temperature))(features, torch.from_numpy(case["target"]))
            loss.backward()
            factor = temperature / base
            assert factor * loss.item() == pytest.approx(float(case["loss"][number]), rel=1e-9)
            np.testing.assert_allclose(factor * features.grad, case["grad_features"][number], atol=1e-9)
            checked += 1
    assert checked == 16


def vectors(*shape, seed=0):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


TARGET = torch.tensor([0, 0, 1, 2, 1])


def naive_supcon(features, target, temperature):
    """The formula, anchor by anchor."""
    samples = [(view.numpy(), int(label)) for row, label in zip(features, target, strict=True) for view in row]
    losses = []
    for i, (anchor, label) in enumerate(samples):
        others = [(np.exp(anchor @ z / temperature), y) for j, (z, y) in enumerate(samples) if j != i]
        total = sum(value for value, _ in others)
        positives = [-np.log(value / total) for value, y in others if y == label]
        losses.append(np.mean(positives) if positives else 0.0)
    return np.mean(losses)


@pytest.mark.parametrize("views", [1, 2, 3])
def test_supcon_is_the_formula(views):
    features = vectors(5, views, 4)
    loss = SupCon(0.2)(features, TARGET)
    assert loss.item() == pytest.approx(naive_supcon(features, TARGET, 0.2), rel=1e-9)


def test_prototypical_is_the_formula():
    features, prototypes = vectors(5, 4), vectors(3, 4, seed=1)
    terms = []
    for z, label in zip(features.numpy(), TARGET.tolist(), strict=True):
        similar = np.exp(prototypes.numpy() @ z / 0.2)
        terms.append(-np.log(similar[label] / (similar.sum() - similar[label])))
    assert prototypical(features, TARGET, prototypes, 0.2).item() == pytest.approx(np.mean(terms), rel=1e-9)


def test_gradients_are_derivatives():
    assert gradcheck(lambda z: SupCon(0.3)(z, TARGET), vectors(5, 2, 4).requires_grad_())
    z, p = vectors(5, 4).requires_grad_(), vectors(3, 4, seed=1).requires_grad_()
    assert gradcheck(lambda z, p: prototypical(z, TARGET, p, 0.3), (z, p))


def test_a_lone_image_and_a_tiny_temperature_are_finite():
    lone = vectors(1, 1, 4).float().requires_grad_()
    loss = SupCon(0.1)(lone, torch.tensor([0]))
    loss.backward()
    assert loss == 0
    assert lone.grad.isfinite().all()
    for loss in (
        SupCon(1e-4)(vectors(5, 2, 4).float(), TARGET),
        prototypical(vectors(5, 4).float(), TARGET, vectors(3, 4).float(), 1e-4),
    ):
        assert loss.isfinite()


def test_same_views_of_one_class_are_as_near_as_they_can_be():
    features = vectors(1, 1, 4).expand(6, 2, 4)
    loss = SupCon(0.1)(features, torch.zeros(6, dtype=torch.long))
    assert loss.item() == pytest.approx(np.log(11))
