import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import functional_call

from longtail.networks import CausalNorm

WEIGHT = "parametrizations.weight.original"


def network(on_features, case, **options):
    """The network of a golden case with its class vectors and moving average."""
    params = case["params"]
    settings = {"heads": params["num_head"], "tau": params["tau"], "gamma": params["gamma"]} | options
    model = on_features(CausalNorm, case, **settings)
    model.head.load_state_dict({WEIGHT: torch.from_numpy(case["weight"])})
    model.mean_features.copy_(torch.from_numpy(case["embed"]))
    return model


def test_training_logits_and_gradient_agree_with_the_authors_code(golden, on_features):
    for case in golden("causal_norm"):
        model = network(on_features, case).train()
        logits = model(torch.from_numpy(case["features"]))
        np.testing.assert_allclose(logits.detach(), case["train_logits"], atol=1e-9)
        loss = F.cross_entropy(logits, torch.from_numpy(case["target"]))
        loss.backward()
        assert loss.item() == pytest.approx(float(case["train_ce_loss"]), rel=1e-9)
        gradient = dict(model.head.named_parameters())[WEIGHT].grad
        np.testing.assert_allclose(gradient, case["grad_weight"], atol=1e-9)


def test_test_logits_agree_with_the_authors_code(golden, on_features):
    for case in golden("causal_norm"):
        for number, alpha in enumerate(case["alphas"]):
            model = network(on_features, case, alpha=float(alpha)).eval()
            logits = model(torch.from_numpy(case["features"])).detach()
            np.testing.assert_allclose(logits, case["test_logits"][number], atol=1e-9)


def test_the_moving_average_agrees_with_the_authors_code(golden, on_features):
    for case in golden("causal_norm"):
        model = network(on_features, case).train()
        model.mean_features.zero_()
        for batch, expected in zip(case["embed_batches"], case["embed_sequence"], strict=True):
            model(torch.from_numpy(batch))
            np.testing.assert_allclose(model.mean_features, expected, rtol=1e-12)
        np.testing.assert_allclose(model.mean_features, case["embed"], rtol=1e-12)


CASE = {
    "features": np.random.default_rng(0).normal(size=(5, 6)),
    "class_counts": np.array([50, 10, 2, 1]),
}
X = torch.from_numpy(CASE["features"])


def naive(x, weight, mean, heads, tau, gamma, alpha):
    """The formula, number by number; alpha None in training."""
    size = len(x[0]) // heads
    logits = np.zeros((len(x), len(weight)))
    for i, row in enumerate(x):
        for k, vector in enumerate(weight):
            for h in range(heads):
                part = slice(h * size, (h + 1) * size)
                f, w, m = row[part], vector[part], mean[part]
                f = f / np.sqrt((f * f).sum())
                if alpha is not None:
                    m = m / np.sqrt((m * m).sum())
                    f = f - alpha * (f @ m) * m
                logits[i, k] += tau / heads * (f @ w) / (np.sqrt((w * w).sum()) + gamma)
    return logits


@pytest.mark.parametrize(("heads", "gamma", "alpha"), [(1, 0.0, 1.5), (2, 1 / 32, 3.0), (3, 0.2, 0.0)])
def test_logits_are_the_formula(on_features, heads, gamma, alpha):
    model = on_features(CausalNorm, CASE, heads=heads, gamma=gamma, alpha=alpha, tau=7.0).train()
    weight = dict(model.head.named_parameters())[WEIGHT].detach().numpy()
    expected = naive(CASE["features"], weight, X.mean(0).numpy(), heads, 7.0, gamma, None)
    np.testing.assert_allclose(model(X).detach(), expected, rtol=1e-9)
    expected = naive(CASE["features"], weight, X.mean(0).numpy(), heads, 7.0, gamma, alpha)
    np.testing.assert_allclose(model.eval()(X).detach(), expected, rtol=1e-9)


def test_gradient_is_the_derivative(on_features):
    model = on_features(CausalNorm, CASE).eval()
    model.observe(X)
    names, values = zip(*model.named_parameters(), strict=True)

    def logits(x, *parameters):
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(logits, (X.clone().requires_grad_(), *values))


def test_without_alpha_or_average_nothing_is_taken_out(on_features):
    model = on_features(CausalNorm, CASE).train()
    assert torch.equal(model.eval().normalise(X), model.train().normalise(X))  # no average yet
    model.observe(X)
    assert not torch.equal(model.eval().normalise(X), model.train().normalise(X))
    model.alpha = 0.0
    assert torch.equal(model.eval().normalise(X), model.train().normalise(X))


def test_alpha_one_takes_out_the_whole_direction(on_features):
    model = on_features(CausalNorm, CASE, heads=1, alpha=1.0).eval()
    model.observe(X)
    left = model.normalise(X) @ model.mean_features
    torch.testing.assert_close(left, torch.zeros_like(left), atol=1e-12, rtol=0)


def test_the_average_stands_still_in_evaluation(on_features):
    model = on_features(CausalNorm, CASE).train()
    model(X)
    before = model.mean_features.clone()
    model.eval()(X)
    assert torch.equal(model.mean_features, before)
    assert "mean_features" in model.state_dict()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4, 1e30])
def test_finite_at_extreme_features(on_features, size):
    model = on_features(CausalNorm, CASE, gamma=0.0).float()
    x = (size * X.float()).requires_grad_()
    loss = F.cross_entropy(model.train()(x), torch.tensor([0, 0, 1, 2, 3]))
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert model.eval()(x).isfinite().all()
    assert model(1e4 * torch.ones(1, 6)).isfinite().all()
