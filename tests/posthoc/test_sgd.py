"""Stage two by SGD, compared with the formula of single steps."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail import MARC
from longtail.data.loading import Sampler
from longtail.posthoc.gate import FitWarning
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.solver.sgd import learning_rate, train_affine, train_parameters

from .conftest import LABELS, LOGITS, TARGET


def test_stage_two_is_sgd_with_momentum_along_a_cosine():
    """Every step beside the optimiser's formula, with the sampler's own batches."""
    start = torch.tensor([0.3, -0.2])
    rates = torch.from_numpy(LOGITS[:, :2]).float()
    trained = start.clone().requires_grad_()

    def loss(rows):
        return (rates[rows] @ trained).square().mean()

    value = train_parameters([trained], loss, LABELS, steps=5, batch_size=4, lr=0.1, warmup=2, weight_decay=0.3, seed=5)
    by_hand, velocity, sampler = start.clone(), torch.zeros(2), Sampler(LABELS, "instance", seed=5)
    schedule = [0.15, 0.2, *(0.1 * (1 + math.cos(math.pi * step / 3)) for step in range(3))]
    for step, rate in enumerate(schedule):
        assert learning_rate(step, 5, 0.1, 2) == pytest.approx(rate)
        rows = rates[torch.from_numpy(sampler.batch(step, 4).indices)]
        last = (rows @ by_hand).square().mean()
        gradient = 2 * rows.T @ (rows @ by_hand) / 4 + 0.3 * by_hand
        velocity = gradient if step == 0 else 0.9 * velocity + gradient
        by_hand = by_hand - rate * velocity
    torch.testing.assert_close(trained.detach(), by_hand)
    assert value == pytest.approx(last.item(), rel=1e-5)
    assert [learning_rate(step, 4, 0.2) for step in (0, 2, 4)] == pytest.approx([0.2, 0.1, 0])
    assert learning_rate(3, 3, 0.2, 3) == pytest.approx(0.4)


@pytest.mark.parametrize("divide_by", ["batch", "weights"])
def test_one_step_of_omega_and_beta(divide_by):
    norms = np.array([0.5, 1.0, 2.0, 3.0])
    data = from_arrays(LOGITS, LABELS, weight_norms=norms)
    weights = torch.tensor([0.5, 0.5, 1.0, 2.0])
    centre = np.zeros(8)
    found = train_affine(
        data,
        weights,
        steps=1,
        batch_size=19,
        lr=0.1,
        warmup=0,
        weight_decay=0.5,
        centre=centre,
        divide_by=divide_by,
        seed=0,
    )
    x = torch.cat([torch.ones(4), torch.zeros(4)]).requires_grad_()
    stored = data.rows.read(slice(None)).float()
    logits = stored * x[:4] + x[4:] * torch.from_numpy(norms).float()
    mean = F.cross_entropy(logits, TARGET, weights, reduction="sum")
    loss = mean / (19 if divide_by == "batch" else weights[TARGET].sum())
    loss = loss + 0.25 * (weights[TARGET].mean() if divide_by == "batch" else 1) * x.square().sum()
    loss.backward()
    np.testing.assert_allclose(found.x, (x - 0.1 * x.grad).detach(), rtol=1e-5)
    assert found.value == pytest.approx(loss.item(), rel=1e-5)
    assert (found.converged, found.evaluations, found.gradient) == (True, 1, None)


def test_steps_are_those_of_torch_to_the_last_bit():
    rates = torch.from_numpy(LOGITS[:, :2]).float()
    trained, beside = (torch.tensor([0.3, -0.2], requires_grad=True) for _ in range(2))
    optimizer, sampler = torch.optim.SGD([beside], momentum=0.9, weight_decay=0.3), Sampler(LABELS, seed=5)
    train_parameters(
        [trained],
        lambda rows: (rates[rows] @ trained).square().mean(),
        LABELS,
        steps=7,
        batch_size=4,
        lr=0.1,
        weight_decay=0.3,
        seed=5,
    )
    for step in range(7):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 7, 0.1)
        optimizer.zero_grad()
        (rates[torch.from_numpy(sampler.batch(step, 4).indices)] @ beside).square().mean().backward()
        optimizer.step()
    assert torch.equal(trained, beside)


def test_a_scale_at_its_bound_can_rise_again():
    """The first batches push the scales of these two classes below zero."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [2000, 10])
    margin = 3 * (rng.normal(size=len(y)) + 4 * y - 5)
    logits = np.stack([-margin / 2, margin / 2], 1)
    sgd = MARC(solver="sgd", divide_by="weights", max_iter=300).fit(logits, y)
    np.testing.assert_allclose(sgd.omega_, MARC().fit(logits, y).omega_, rtol=0.2)
    assert sgd.result_.gradient < 0.1


def test_too_few_steps_are_warned_of():
    with pytest.warns(FitWarning, match="1 steps of SGD at lr 1e-09 were not enough for MARC"):
        marc = MARC(solver="sgd", lr=1e-9, max_iter=1).fit(LOGITS, LABELS)
    assert not marc.result_.converged
