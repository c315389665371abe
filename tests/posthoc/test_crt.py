import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from longtail import Outputs
from longtail.errors import UserError
from longtail.posthoc import CRT
from longtail.posthoc.solver.linear import LinearProblem, balanced_weights, class_statistics, plain_penalty


def clouds(seed=0, counts=(200, 60, 15)):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(counts)), counts)
    centres = rng.normal(size=(len(counts), 5))
    return (centres[y] + rng.normal(size=(len(y), 5))).astype(np.float32), y


def test_value_and_gradient_are_those_of_autograd():
    features, y = clouds()
    labels = torch.from_numpy(y)
    weights = balanced_weights(labels, 3)
    statistics = class_statistics(features, labels, 3)
    problem = LinearProblem(features, labels, weights, statistics, plain_penalty(0.01, statistics))
    x = np.random.default_rng(1).normal(size=18)
    head = problem.head(x)
    weight, bias = (torch.from_numpy(part).requires_grad_() for part in (head.weight, head.bias))
    losses = F.cross_entropy(F.linear(torch.from_numpy(features).double(), weight, bias), labels, reduction="none")
    loss = (weights * losses).sum() + 0.005 * (weight.square().sum() + bias.square().sum())
    loss.backward()
    value, gradient = problem.value_and_gradient(x)
    assert value == pytest.approx(loss.item(), rel=1e-9)
    for step in np.random.default_rng(2).normal(size=(4, 18)):
        moved = problem.head(x + 1e-6 * step)
        along = ((moved.weight - head.weight) * weight.grad.numpy()).sum()
        along += ((moved.bias - head.bias) * bias.grad.numpy()).sum()
        assert 1e-6 * gradient @ step == pytest.approx(along, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_passes_do_not_grow_with_the_scale_of_the_features(scale):
    features, y = clouds(counts=(400, 120, 30))
    stretched = scale * features * np.geomspace(1, 100, 5)
    crt = CRT(ridge=1e-9 * scale**2).fit(np.ones((len(y), 3)), y, features=stretched)
    assert crt.result_.converged
    assert crt.n_iter_ < 60


def test_exact_is_the_balanced_logistic_regression_of_scikit_learn():
    features, y = clouds()
    ridge = 0.01
    ours = CRT(ridge=ridge, tolerance=1e-7).fit(np.zeros((len(y), 3)) + 1.0, y, features=features)
    # scikit-learn sums the weighted losses and adds |W|^2 / (2 C); a constant column makes it pull on the bias too.
    theirs = LogisticRegression(
        C=1 / (ridge * len(y)), class_weight="balanced", fit_intercept=False, max_iter=5000, tol=1e-9
    )
    with_constant = np.column_stack([features, np.ones(len(y))])
    theirs.fit(with_constant, y)
    np.testing.assert_allclose(np.column_stack([ours.weight_, ours.bias_]), theirs.coef_, atol=1e-3)


def test_sgd_comes_near_the_exact_optimum():
    features, y = clouds(counts=(400, 150, 50))
    logits = np.ones((len(y), 3))
    exact = CRT(ridge=0.01).fit(logits, y, features=features)
    sgd = CRT("sgd", ridge=0.01, max_iter=1000, batch_size=128).fit(logits, y, features=features)
    agree = exact.predict(logits, features) == sgd.predict(logits, features)
    assert agree.mean() > 0.97


def test_features_are_asked_for():
    features, y = clouds()
    logits = 3 * np.eye(3)[y]
    with pytest.raises(UserError, match=r"CRT needs features \(N, D\): pass Outputs that have them"):
        CRT().fit(logits, y)
    with pytest.raises(UserError, match="CRT needs features"):
        CRT().fit(Outputs(y, np.bincount(y), logits=logits))
    with pytest.raises(UserError, match=r"features must have shape \(275, D\)"):
        CRT().fit(logits, y, features=features[:5])
    spoiled = features.copy()
    spoiled[7, 0] = np.inf
    with pytest.raises(UserError, match="features of row 7"):
        CRT().fit(logits, y, features=spoiled)
