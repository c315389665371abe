"""The mixture of heads that HALO fits: its value, gradient, priors and weights of samples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import approx_fprime

from longtail.posthoc.halo.mixture import PRIORS, Mixture
from longtail.posthoc.halo.unseen import ScoredSamples
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.priors import sample_weights

from .conftest import LABELS, LOGITS, RNG, TARGET


def test_the_stack_has_the_gradient_and_hessian_of_its_value():
    names = ["model", "lda", "prior", "norms"]
    weights = torch.from_numpy(RNG.uniform(0.5, 2, 19))
    scores = [torch.from_numpy(LOGITS), torch.from_numpy(RNG.normal(size=(19, 4)))]
    vectors = torch.from_numpy(RNG.normal(size=(2, 4)))
    parts = [slice(0, 7), slice(7, 19)]
    stacked = torch.stack([scores[0], scores[0] + scores[1]]).transpose(1, 2)  # the second is mixed as a difference
    stack = Mixture(
        names, lambda: (ScoredSamples.from_scores(TARGET[p], weights[p], stacked[:, :, p]) for p in parts), vectors
    )
    x = np.array([0.5, 0.3, -0.2, 0.1])
    value, gradient, hessian = stack.evaluate(x)
    logits = x[0] * scores[0] + x[1] * scores[1] + torch.from_numpy(x[2:]) @ vectors
    coupled = [*x[:2], x[2] + x[0] - x[1], x[3]]  # log pi has the coefficient beside eta, and that of the eta mixed in
    prior = sum(
        0.5 * ((at - PRIORS[name].mean) / PRIORS[name].deviation) ** 2 for name, at in zip(names, coupled, strict=True)
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


def test_weights_of_held_out_samples_sum_to_their_effective_number():
    counts = np.array([90, 50, 30, 20])
    for labels in (LABELS, np.repeat(np.arange(4), 30), np.repeat([0, 1, 2, 3], [1, 30, 30, 1]), np.repeat([0, 1], 30)):
        own = np.sqrt(counts)[labels] / np.bincount(labels)[labels]
        np.testing.assert_allclose(sample_weights(labels, counts), own * own.sum() / np.square(own).sum())


def test_what_a_sample_counts_for():
    """A set of 12, 4 and 0 samples that stands for training counts of 60, 30 and 10."""
    data = from_arrays(np.zeros((16, 3)), np.repeat([0, 1], [12, 4]), class_counts=[60, 30, 10], need_every_class=False)
    np.testing.assert_allclose(data.frequency, [0.6 / 0.75, 0.3 / 0.25, 0])
    assert data.seen_counts.tolist() == [12, 4, 0]
    part = data.subset(np.array([0, 12, 13]))
    assert part.labels.tolist() == [0, 1, 1]
    assert part.rows.shape == (3, 3)
    assert part.features is None


def held_scores(size=1.0, seed=0, samples=200):
    """A model's logits in some unit, and its samples."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(np.arange(samples) % 4)
    logits = 2 * (2 * np.eye(4)[labels.numpy()] + rng.normal(size=(samples, 4)))  # logarithms of odds
    return ScoredSamples.from_scores(
        labels, torch.ones(samples, dtype=torch.float64), size * torch.from_numpy(logits).T[None]
    )


def stack_of(held, **options):
    return Mixture(["model", "prior"], lambda: [held], torch.from_numpy(np.log([[0.4, 0.3, 0.2, 0.1]])), **options)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 20.0, 1e3])
def test_priors_are_taken_in_the_unit_in_which_scores_are_logits(size):
    """The fit of scores in another unit is that of logits, and a prior keeps its mean in deviations."""
    usual, stack = stack_of(held_scores()), stack_of(held_scores(size))
    expected, found = usual.solve(exact=True).x, stack.solve(exact=True)
    assert found.converged
    assert found.x[0] * size == pytest.approx(expected[0], rel=0.1)
    losses = [usual.evaluate(x)[0] - usual._prior(x)[0] for x in (expected, np.array([size * found.x[0], found.x[1]]))]
    assert losses[1] < losses[0] + 0.5
    assert stack.means[0] * np.sqrt(stack.precision[0]) == pytest.approx(1 / 1.4 / 0.25)
    assert stack.means[0] * size == pytest.approx(expected[0], rel=0.5)
    assert (stack.means[0] == 1 / 1.4) == (size == 1)
    assert found.evaluations == stack.passes
    if size == 1:
        assert found.evaluations <= 5  # no pass looks for another unit


def test_a_rough_solve_is_within_a_small_part_of_a_standard_error():
    exact, rough = stack_of(held_scores()), stack_of(held_scores())
    best, found = exact.solve(exact=True), rough.solve()
    deviation = 1 / np.sqrt(np.diag(exact.evaluate(best.x)[2]))
    assert (np.abs(found.x - best.x) < 0.05 * deviation).all()
    assert found.evaluations < best.evaluations
    assert found.value == pytest.approx(best.value, abs=0.02)


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_first_solve_on_subsample_saves_passes_and_changes_nothing(size):
    """Blocks of uneven sizes; one in four samples leads near the solution, whatever the unit of the scores."""

    def blocks():
        whole = held_scores(size, samples=2001)
        return [whole.subset(slice(start, stop)) for start, stop in ((0, 5), (5, 6), (6, 1000), (1000, 2001))]

    plain, led = (
        Mixture(["model", "prior"], blocks, torch.from_numpy(np.log([[0.4, 0.3, 0.2, 0.1]])), subsampling=every)
        for every in (1, 4)
    )
    best, found = plain.solve(exact=True), led.solve(exact=True)
    np.testing.assert_allclose(found.x * [size, 1], best.x * [size, 1], atol=2e-2 if size != 1 else 1e-5)
    assert found.converged
    assert found.evaluations < best.evaluations
