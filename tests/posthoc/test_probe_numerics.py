"""The objective of Probe's head, its coordinates and its scale, recomputed naively."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression

from longtail.posthoc.probe import ridge_head
from longtail.posthoc.probe.choice import Choice
from longtail.posthoc.probe.inputs import Rows
from longtail.posthoc.probe.metric import Coordinates, Metric, Statistics, statistics
from longtail.posthoc.probe.result import SPREAD, USUAL_SCALE, Evidence, estimate
from longtail.posthoc.probe.ridge_head import Head, RidgeProblem

COUNTS = np.array([30, 12, 6, 3])
LABELS = np.repeat(np.arange(4), COUNTS)
RNG = np.random.default_rng(3)
FEATURES = RNG.normal(size=(51, 4)) * [1.0, 2.0, 0.5, 1.0] + 5 + RNG.normal(size=(4, 4))[LABELS]
METRICS = [Metric(0.1), Metric(0.5), Metric(1.0), Metric(0.3, scaled=True)]


def ridges(ridge, power=0.5):
    """Of the classes."""
    return Choice(METRICS[0], ridge, len(LABELS), power).ridges(torch.from_numpy(COUNTS).double(), torch.float64)


def naive_within():
    """Covariance within classes, every class with the same weight."""
    return np.mean([np.cov(FEATURES[c == LABELS].T, bias=True) for c in range(4)], axis=0)


def naive_metric(metric):
    within = naive_within()
    target = np.diag(np.diag(within)) if metric.scaled else np.trace(within) / 4 * np.eye(4)
    return (1 - metric.shrinkage) * within + metric.shrinkage * target


def naive_objective(vector, ridge, metric):
    matrix = vector.reshape(4, 5)
    scores = (FEATURES - FEATURES.mean(0)) @ matrix[:, :-1].T + matrix[:, -1]
    loss = -log_softmax(scores, axis=1)[np.arange(51), LABELS].mean()
    ridges = ridge * np.sqrt(COUNTS / COUNTS.mean())
    pulls = np.einsum("kd,de,ke->k", matrix[:, :-1], metric, matrix[:, :-1])
    return loss + 0.5 * ridges @ pulls + 0.05 / 51 * ((matrix[:, -1] - np.log(COUNTS / 51)) ** 2).sum()


def problem_of(metric, features=FEATURES):
    rows, labels = Rows(features, columns=4), torch.from_numpy(LABELS)
    return RidgeProblem(rows, labels, 4, Coordinates(statistics(rows, labels, 4), metric, torch.float64))


def test_statistics_are_covariances():
    rows, labels = Rows(FEATURES), torch.from_numpy(LABELS)
    found = statistics(rows, labels, 4)
    np.testing.assert_allclose(found.centre, FEATURES.mean(0))
    np.testing.assert_allclose(found.within, naive_within())
    np.testing.assert_allclose(found.total, np.cov(FEATURES.T, bias=True))
    sparse = statistics(Rows(csr_matrix(FEATURES)), labels, 4)
    np.testing.assert_allclose(sparse.within, np.diag(naive_within()))
    np.testing.assert_allclose(sparse.total, FEATURES.var(0))


@pytest.mark.parametrize("metric", METRICS, ids=str)
def test_coordinates_make_metric_and_covariance_diagonal(metric):
    system = problem_of(metric).system
    rotation = system.weight(torch.eye(4, dtype=torch.float64)).T.numpy()  # R: W = V R'
    np.testing.assert_allclose(rotation.T @ naive_metric(metric) @ rotation, np.eye(4), atol=1e-9)
    total = rotation.T @ np.cov(FEATURES.T, bias=True) @ rotation
    np.testing.assert_allclose(total, np.diag(system.curvature), atol=1e-9)


@pytest.mark.parametrize("metric", METRICS, ids=str)
@pytest.mark.parametrize("ridge", [0.3, 1e-3])
def test_the_head_is_the_optimum_of_the_naive_objective(metric, ridge):
    problem = problem_of(metric)
    head = problem.solve(Head.start(problem.prior, 4), ridges(ridge), 1e-8)
    weight = problem.system.weight(head.coordinates)
    found = torch.cat([weight, head.bias.unsqueeze(1)], 1).numpy().ravel()
    args = (ridge, naive_metric(metric))
    expected = minimize(naive_objective, np.zeros(20), args, method="BFGS", options={"gtol": 1e-7})
    assert naive_objective(found, *args) <= expected.fun + 1e-10
    np.testing.assert_allclose(found, expected.x, atol=2e-3)
    value, gradient, spread = problem.value_and_gradient(
        torch.cat([head.coordinates, head.bias.unsqueeze(1)], 1), ridges(ridge)
    )
    assert value == pytest.approx(naive_objective(found, *args), abs=1e-10)
    assert float(gradient.norm()) < 1e-6
    shares = np.exp(log_softmax((FEATURES - FEATURES.mean(0)) @ weight.numpy().T + head.bias.numpy(), axis=1))
    np.testing.assert_allclose(spread, (shares * (1 - shares)).mean(0))


@pytest.mark.parametrize("metric", METRICS, ids=str)
def test_fewer_samples_than_features_have_the_same_optimum(metric):
    rng = np.random.default_rng(5)
    features, labels = rng.normal(size=(12, 30)) * rng.uniform(0.1, 3, 30) + 2, np.arange(12) % 3
    rows, targets = Rows(features, columns=3), torch.from_numpy(labels)
    thin = statistics(rows, targets, 3)
    full = Statistics(thin.centre, thin.within @ thin.within.T, thin.total @ thin.total.T)
    assert thin.within.shape == (30, 12)
    np.testing.assert_allclose(full.total, np.cov(features.T, bias=True), atol=1e-9)
    heads = []
    for moments in (thin, full):
        problem = RidgeProblem(rows, targets, 3, Coordinates(moments, metric, torch.float64))
        start = Head.start(problem.prior, len(problem.system.curvature))
        head = problem.solve(start, torch.full((3, 1), 0.03, dtype=torch.float64), 1e-9)
        heads.append(problem.system.weight(head.coordinates))
        torch.testing.assert_close(problem.system.weight(problem.system.of_weight(heads[-1])), heads[-1])
    np.testing.assert_allclose(*heads, atol=1e-6)


def test_one_ridge_for_all_classes_is_logistic_regression(monkeypatch):
    monkeypatch.setattr(ridge_head, "BIAS_PRECISION", 1e-9)
    problem = problem_of(Metric(1.0))
    head = problem.solve(Head.start(problem.prior, 4), ridges(0.1, 0.0), 1e-8)
    strength = 0.1 * np.trace(naive_within()) / 4 * 51
    peer = LogisticRegression(C=1 / strength, tol=1e-9, max_iter=5000).fit(FEATURES, LABELS)
    np.testing.assert_allclose(problem.system.weight(head.coordinates), peer.coef_, atol=1e-4)


def test_sparse_features_have_the_same_objective():
    dense, sparse = problem_of(Metric(1.0)), problem_of(Metric(1.0), csr_matrix(FEATURES))
    heads = [problem.solve(Head.start(problem.prior, 4), ridges(0.01), 1e-8) for problem in (dense, sparse)]
    weights = [problem.system.weight(head.coordinates) for problem, head in zip((dense, sparse), heads, strict=True)]
    np.testing.assert_allclose(*weights, atol=1e-5)


def test_chunks_do_not_matter(monkeypatch):
    problem = problem_of(Metric(0.5))
    vector = torch.from_numpy(RNG.normal(size=(4, 5)))
    value, gradient, _ = problem.value_and_gradient(vector, ridges(0.1))
    monkeypatch.setattr("longtail.posthoc.probe.inputs.CHUNK_NUMBERS", 64)
    assert len(list(problem.rows.slices())) > 2
    again, slopes, _ = problem.value_and_gradient(vector, ridges(0.1))
    assert again == pytest.approx(value)
    np.testing.assert_allclose(slopes, gradient, atol=1e-12)


def test_single_precision_is_near(monkeypatch):
    exact = problem_of(Metric(0.5))
    monkeypatch.setattr("longtail.posthoc.probe.inputs.SMALL", 0)
    rows, labels = Rows(FEATURES, columns=4), torch.from_numpy(LABELS)
    assert rows.dtype == torch.float32
    quick = RidgeProblem(rows, labels, 4, Coordinates(statistics(rows, labels, 4), Metric(0.5), torch.float32))
    heads = [
        problem.solve(Head.start(problem.prior, 4), ridges(0.01).to(problem.rows.dtype), 1e-3)
        for problem in (exact, quick)
    ]
    weights = [problem.system.weight(head.coordinates) for problem, head in zip((exact, quick), heads, strict=True)]
    np.testing.assert_allclose(*weights, atol=0.02)


def evidence_of(temperature, number=4000, seed=0):
    """Evidence of samples drawn from it at the training prior, times 1 / temperature."""
    rng = np.random.default_rng(seed)
    counts = np.array([1000, 300, 100, 30])
    scores = rng.normal(size=(number, 4)) * 2
    chances = np.exp(log_softmax(scores + np.log(counts), axis=1))
    labels = (chances.cumsum(1) < rng.random((number, 1))).sum(1)
    return Evidence(torch.from_numpy(scores / temperature), torch.from_numpy(labels), counts)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_scale_is_recovered(temperature):
    scale, _ = evidence_of(temperature).best_scale()
    assert scale == pytest.approx(temperature, rel=0.12)


def test_the_loss_of_a_scale_is_the_weighted_likelihood():
    evidence = evidence_of(1.0, 200)
    scale, loss = evidence.best_scale()
    labels, counts = evidence.labels.numpy(), evidence.counts
    weights = counts[labels] ** -0.5
    weights /= weights.sum()
    moved = scale * evidence.scores.numpy() + 0.5 * np.log(counts)
    likelihood = log_softmax(moved, axis=1)[np.arange(200), labels]
    prior = (np.log(scale / USUAL_SCALE) / SPREAD) ** 2 / 2 * (weights**2).sum()
    assert loss == pytest.approx(-weights @ likelihood + prior)


def test_samples_that_are_all_recognised_do_not_ask_for_an_infinite_scale():
    labels = torch.arange(3).repeat(10)
    evidence = Evidence(10 * torch.eye(3, dtype=torch.float64)[labels], labels, np.array([10, 10, 10]))
    assert evidence.best_scale()[0] == pytest.approx(USUAL_SCALE, rel=0.1)


def test_estimates_are_scores_of_held_out_samples():
    evidence = evidence_of(1.0)
    labels = evidence.labels.numpy()
    balanced, natural = (estimate(evidence, 1.0, balanced=choice) for choice in (True, False))
    best = evidence.scores.argmax(1).numpy()
    assert balanced.accuracy == pytest.approx(np.mean([(best[labels == c] == c).mean() for c in range(4)]))
    logits = evidence.scores.numpy() + np.log(evidence.counts)
    assert natural.accuracy == pytest.approx((logits.argmax(1) == labels).mean())
    assert natural.nll == pytest.approx(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())
    assert natural.ece < 0.03  # the evidence is calibrated by construction
    assert balanced.high - balanced.low > natural.high - natural.low  # few samples of small classes
