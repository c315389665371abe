"""Class statistics and the linear heads of HALO, each compared with its formula."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.outputs.rows import LogitRows
from longtail.posthoc.halo.heads import balanced_head, lda_head, spread
from longtail.posthoc.solver.linear import ClassStatistics, LinearHead, StackedHeads, balanced_weights, class_statistics

from .conftest import FEATURES, HEAD, LABELS, LOGITS, RNG, TARGET


def test_class_statistics_are_means_and_a_shrunk_balanced_covariance():
    found = class_statistics(FEATURES, TARGET, 4)
    means = np.stack([FEATURES[label == LABELS].mean(0) for label in range(4)])
    within = sum(np.cov(FEATURES[label == LABELS].T, bias=True) for label in range(4)) / 4
    np.testing.assert_allclose(found.means, means)  # features are read as float32
    np.testing.assert_allclose(found.covariance, 0.9 * within + 0.1 * np.trace(within) / 3 * np.eye(3), rtol=1e-5)
    np.testing.assert_allclose(found.centre, means.mean(0))
    between = means - means.mean(0)
    moments = found.second_moments()
    np.testing.assert_allclose(moments[:3, :3], found.covariance + between.T @ between / 4)
    assert moments[3].tolist() == moments[:, 3].tolist() == [0, 0, 0, 1]


def test_features_that_do_not_vary_within_classes_have_the_plain_metric():
    found = class_statistics(np.eye(4)[LABELS], TARGET, 4)
    np.testing.assert_array_equal(found.covariance, np.eye(4))


def test_the_lda_head_is_that_of_the_formula():
    statistics = ClassStatistics(RNG.normal(size=(4, 3)), np.diag([0.5, 1.0, 2.0]))
    head, centre = lda_head(statistics), statistics.means.mean(0)
    for label, mean in enumerate(statistics.means):
        weight = (mean - centre) / [0.5, 1.0, 2.0]
        np.testing.assert_allclose(head.weight[label], weight)
        assert head.bias[label] == pytest.approx(-0.5 * weight @ (mean + centre))
    centred = head.centred()
    np.testing.assert_allclose(centred.scores(torch.from_numpy(FEATURES)).mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(centred.times(3.0).bias, 3 * centred.bias)
    np.testing.assert_allclose(centred.times(3.0).weight, 3 * centred.weight)


def test_the_balanced_head_minimises_its_loss():
    """At the optimum in whitened features the gradient of loss and ridges is 0."""
    statistics = class_statistics(FEATURES, TARGET, 4)
    head, solution = balanced_head(FEATURES, TARGET, statistics, tolerance=1e-8)
    assert solution.converged
    values, vectors = np.linalg.eigh(statistics.covariance)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    white = torch.from_numpy((FEATURES - statistics.centre) @ inverse)
    weight = torch.from_numpy(head.weight @ root).requires_grad_()
    bias = torch.from_numpy(head.bias + head.weight @ statistics.centre).requires_grad_()
    losses = F.cross_entropy(white @ weight.T + bias, TARGET, reduction="none")
    loss = (losses * balanced_weights(TARGET, 4)).sum() + 0.005 * weight.square().sum() + 0.5e-4 * bias.square().sum()
    loss.backward()
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-6  # features are read as float32
    assert solution.value == pytest.approx(loss.item(), rel=1e-5)


def test_the_spread_of_scores_is_their_standard_deviation():
    weights = torch.from_numpy(RNG.uniform(0.5, 2, 19))
    centred = LOGITS - LOGITS.mean(1, keepdims=True)
    share = weights.numpy()[:, None] / (4 * weights.sum().item())
    expected = np.sqrt((share * centred**2).sum() - (share * centred).sum() ** 2)
    assert spread(LogitRows(LOGITS), weights) == pytest.approx(expected, rel=1e-6)
    head = LinearHead(HEAD["head_weight"].astype(np.float64), HEAD["head_bias"].astype(np.float64))
    scores = head.scores(torch.from_numpy(FEATURES)).numpy()
    by_head = spread(LogitRows(FEATURES), weights, head=head)
    assert by_head == pytest.approx(spread(LogitRows(scores), weights), rel=1e-6)


def test_many_heads_score_as_each_of_them_does():
    rng = np.random.default_rng(0)
    heads = [LinearHead(rng.normal(size=(4, 6)), rng.normal(size=4)) for _ in range(3)]
    features = torch.from_numpy(rng.normal(size=(9, 6)))
    for dtype, places in ((torch.float64, 12), (torch.float32, 4)):
        together = StackedHeads(heads).scores(features, dtype)
        assert together.dtype == dtype
        for head, scores in zip(heads, together, strict=True):
            np.testing.assert_almost_equal(scores.T.numpy(), head.scores(features).numpy(), decimal=places)
