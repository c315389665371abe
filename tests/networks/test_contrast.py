import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from longtail.heads.kinds import unit
from longtail.networks.hybrid_sc import prototypical


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
