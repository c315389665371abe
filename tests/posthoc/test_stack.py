"""The mixture of heads that HALO fits: its value, gradient, priors and weights of samples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import approx_fprime

from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.stack import PRIORS, Held, Stack, like_training, sample_weights

from .conftest import LABELS, LOGITS, RNG, TARGET


def test_the_stack_has_the_gradient_and_hessian_of_its_value():
    names = ["model", "lda", "prior", "norms"]
    weights = torch.from_numpy(RNG.uniform(0.5, 2, 19))
    scores = [torch.from_numpy(LOGITS), torch.from_numpy(RNG.normal(size=(19, 4)))]
    vectors = torch.from_numpy(RNG.normal(size=(2, 4)))
    parts = [slice(0, 7), slice(7, 19)]
    stacked = torch.stack([scores[0], scores[0] + scores[1]]).transpose(1, 2)  # the second is mixed as a difference
    stack = Stack(names, lambda: (Held.of(TARGET[p], weights[p], stacked[:, :, p]) for p in parts), vectors)
    x = np.array([0.5, 0.3, -0.2, 0.1])
    value, gradient, hessian = stack.evaluate(x)
    logits = x[0] * scores[0] + x[1] * scores[1] + torch.from_numpy(x[2:]) @ vectors
    prior = sum(
        0.5 * ((at - PRIORS[name].mean) / PRIORS[name].deviation) ** 2 for name, at in zip(names, x, strict=True)
    )
    assert value == pytest.approx((weights * F.cross_entropy(logits, TARGET, reduction="none")).sum().item() + prior)
    np.testing.assert_allclose(gradient, approx_fprime(x, lambda at: stack.evaluate(at)[0], 1e-6), atol=1e-4)
    for place in range(4):
        step = 1e-6 * np.eye(4)[place]
        change = (stack.evaluate(x + step)[1] - stack.evaluate(x - step)[1]) / 2e-6
        np.testing.assert_allclose(hessian[place], change, atol=1e-4)
    solution = stack.solve(exact=True)
    assert solution.converged
    assert solution.evaluations < 12
    assert np.abs(stack.evaluate(solution.x)[1]).max() < 1e-6


def test_priors_of_the_numbers_are_frozen():
    told = {name: (prior.mean, prior.deviation) for name, prior in PRIORS.items()}
    assert told == {
        "model": (1 / 1.4, 0.25),
        "lda": (0.1, 0.2),
        "balanced": (0.1, 0.2),
        "prior": (-0.45, 0.2),
        "norms": (0.0, 0.2),
    }


def test_weights_of_held_out_samples_sum_to_their_effective_number():
    counts = np.array([90, 50, 30, 20])
    like = counts[LABELS] ** -0.5
    np.testing.assert_allclose(sample_weights(LABELS, counts), like * like.sum() / np.square(like).sum())
    balanced = np.repeat(np.arange(4), 30)
    other = np.sqrt(counts)[balanced] / 30
    np.testing.assert_allclose(sample_weights(balanced, counts), other * other.sum() / np.square(other).sum())


def test_what_a_sample_counts_for():
    """A set of 12, 4 and 0 samples that stands for training counts of 60, 30 and 10."""
    data = from_arrays(np.zeros((16, 3)), np.repeat([0, 1], [12, 4]), class_counts=[60, 30, 10], need_every_class=False)
    np.testing.assert_allclose(data.frequency, [0.6 / 0.75, 0.3 / 0.25, 0])
    assert data.seen_counts.tolist() == [12, 4, 0]
    part = data.part(np.array([0, 12, 13]))
    assert part.labels.tolist() == [0, 1, 1]
    assert part.rows.shape == (3, 3)
    assert part.features is None


def test_the_value_of_a_stack_is_that_of_where_it_stopped():
    held = Held.of(TARGET, torch.ones(19, dtype=torch.float64), torch.from_numpy(LOGITS).T[None])
    stack = Stack(["model", "prior"], lambda: [held], torch.from_numpy(np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))))
    solution = stack.solve(exact=True)
    value, gradient, _ = stack.evaluate(solution.x)
    assert solution.value == pytest.approx(value, abs=1e-8)
    assert np.abs(gradient).max() < 1e-5


def test_few_classes_and_few_images_among_the_held_out():
    counts = np.array([900, 90, 9, 4])
    assert like_training(np.array([90, 9, 1, 1]), counts)  # one image more of the rarest is rounding
    assert like_training(np.array([90, 9, 0, 0]), counts)  # absent classes say nothing
    assert not like_training(np.array([20, 20, 20, 20]), counts)
    labels = np.repeat([0, 1], [30, 30])
    other = np.sqrt(counts[labels]) / 30
    np.testing.assert_allclose(sample_weights(labels, counts), other * other.sum() / np.square(other).sum())
    single = np.repeat([0, 1, 2, 3], [1, 30, 30, 1])  # of one image per class the weight is that of one
    other = np.sqrt(counts[single]) / np.array([1, 30, 30, 1])[single]
    np.testing.assert_allclose(sample_weights(single, counts), other * other.sum() / np.square(other).sum())
