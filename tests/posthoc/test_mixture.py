"""The mixture of heads that HALO fits: its value, gradient, priors and weights of samples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import approx_fprime

from longtail.posthoc.halo import unseen as unseen_module
from longtail.posthoc.halo.mixture import PRIORS, Mixture
from longtail.posthoc.halo.unseen import ScoredSamples
from longtail.posthoc.held_out import sample_weights
from longtail.posthoc.inputs import from_arrays

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


def test_the_value_of_a_stack_is_that_of_where_it_stopped():
    held = ScoredSamples.from_scores(TARGET, torch.ones(19, dtype=torch.float64), torch.from_numpy(LOGITS).T[None])
    stack = Mixture(["model", "prior"], lambda: [held], torch.from_numpy(np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))))
    solution = stack.solve(exact=True)
    value, gradient, _ = stack.evaluate(solution.x)
    assert solution.value == pytest.approx(value, abs=1e-8)
    assert np.abs(gradient).max() < 1e-5


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


def test_nothing_is_known_before_a_pass():
    stack = stack_of(held_scores())
    assert (stack.passes, stack.total, stack.curvature, stack.count) == (0, 0.0, 0.0, 1)
    _, _, hessian = stack.evaluate(stack.means)
    assert (stack.passes, stack.total) == (1, 200.0)
    assert stack.curvature == pytest.approx((hessian[0, 0] - stack.precision.sum()) / 200)


def test_classes_without_samples_leave_the_numbers_of_vectors_near_their_priors():
    plain, missing = stack_of(held_scores()), stack_of(held_scores(), extrapolated=True)
    np.testing.assert_allclose(plain.precision, [1 / 0.25**2, 1 / 0.2**2])
    np.testing.assert_allclose(missing.precision, [1 / 0.25**2, 1 / 0.02**2])


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


def test_subsample_stand_for_all():
    """One in four samples counts for four, although every fourth label is the same."""
    whole = held_scores(samples=4000)
    parts = [whole.subset(slice(0, 5)), whole.subset(slice(5, 4000))]
    some = Mixture(["model"], lambda: parts, torch.zeros(0, 4), subsampling=4)._subsample()
    (taken,) = some.batches()
    assert float(taken.weights.sum()) == pytest.approx(4000, rel=0.06)
    assert set(taken.weights.tolist()) == {4.0}
    assert (np.bincount(taken.labels.numpy()) > 200).all()
    known = {tuple(column) for column in whole.scores[0].T.tolist()}
    assert {tuple(column) for column in taken.scores[0].T.tolist()} < known
    assert some.subsampling == 1


def test_a_first_solve_that_leads_nowhere_is_passed_over():
    """If the function is not finite there, the steps start at the prior's means."""

    class Lost(Mixture):
        def _subsample(self):
            some = super()._subsample()
            some._newton = lambda *found, exact: (np.full(2, np.nan), 0.0, True)
            return some

    plain, led = stack_of(held_scores()), Lost(*vars_of(stack_of(held_scores())), subsampling=2)
    np.testing.assert_allclose(led.solve(exact=True).x, plain.solve(exact=True).x, atol=1e-6)


def vars_of(stack):
    return stack.names, stack.batches, stack.vectors


def test_steps_that_lead_uphill_are_halved():
    """A parabola from far away with the curvature of a flat place: the full step goes much too far."""

    class Steep(Mixture):
        def evaluate(self, x):
            self.passes += 1
            self.total, self.curvature = 1.0, 1.0
            d = x - 1.0
            return float(np.log(np.cosh(d)).sum()), np.tanh(d), np.diag(np.cosh(d) ** -2) + 1e-12 * np.eye(2)

    steep = Steep(["model", "prior"], list, torch.zeros(1, 2))
    steep.means = np.array([4.0, 4.0])
    x, value, converged = steep._newton(steep.means, steep.evaluate(steep.means), exact=True)
    assert converged
    np.testing.assert_allclose(x, 1, atol=1e-4)
    assert value == pytest.approx(0, abs=1e-7)
    assert steep.passes < 25


def test_samples_are_worked_on_some_at_a_time(monkeypatch):
    held = held_scores(samples=10)
    assert list(held.blocks()) == [held]
    for block, sizes in ((12, [3, 3, 3, 1]), (40, [10]), (39, [9, 1]), (3, [1] * 10)):
        monkeypatch.setattr(unseen_module, "BLOCK", block)
        parts = list(held.blocks())
        assert [len(part.labels) for part in parts] == sizes
        torch.testing.assert_close(torch.cat([part.scores for part in parts], 2), held.scores)
        torch.testing.assert_close(torch.cat([part.labels for part in parts]), held.labels)
        assert sum(float(part.weights.sum()) for part in parts) == 10


@pytest.mark.parametrize(("every", "starts"), [(1, 0), (2, 1)])
def test_a_solve_on_subsample_comes_first_if_there_are_many(every, starts, monkeypatch):
    asked = []
    real = Mixture._subsample
    monkeypatch.setattr(Mixture, "_subsample", lambda self: asked.append(1) or real(self))
    assert stack_of(held_scores(), subsampling=every).solve(exact=True).converged
    assert len(asked) == starts
