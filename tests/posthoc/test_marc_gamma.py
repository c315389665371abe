"""MARC at several gammas: paths of solves, and gamma chosen on held-out outputs."""

import numpy as np
import pytest
import torch
from sklearn.base import clone

from longtail import MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.marc import class_weights

from .conftest import problem_data


def test_a_path_of_gammas_is_the_solves_one_by_one(cifar_features):
    data = cifar_features
    outputs = Outputs(data["y"], np.bincount(data["y"]), logits=data["views"][0], head_weight=data["weight"])
    path = MARC(tolerance=1e-7).fit_path(outputs, [1.2, 0.3, 0.7])
    assert list(path) == [1.2, 0.3, 0.7]
    for gamma, fitted in path.items():
        alone = MARC(gamma, tolerance=1e-7).fit(outputs)
        assert fitted.result_.converged
        np.testing.assert_allclose(fitted.omega_, alone.omega_, atol=1e-4)
        np.testing.assert_allclose(fitted.beta_, alone.beta_, atol=1e-4)


def test_a_path_of_all_gammas_costs_less_than_five_solves(cifar_features, monkeypatch):
    from longtail.posthoc.solver.affine import AffineProblem

    passes = []
    for name in ("_pass", "gradients"):
        work = getattr(AffineProblem, name)
        monkeypatch.setattr(AffineProblem, name, lambda *a, work=work, **k: passes.append(1) or work(*a, **k))
    data = cifar_features
    outputs = Outputs(data["y"], np.bincount(data["y"]), logits=data["views"][0], head_weight=data["weight"])
    one = MARC().fit(outputs)
    assert len(passes) == one.result_.iterations
    price, _ = len(passes), passes.clear()
    path = MARC().fit_path(outputs)
    assert len(path) == 21
    assert len(passes) <= 5 * price
    assert len(passes) == 1 + sum(fitted.result_.iterations for fitted in path.values())
    # The tolerance holds on all rows, for each gamma by its own gradient at the identity.
    counts = np.bincount(data["y"])
    for gamma, fitted in path.items():
        problem = MARC().problem(MARC()._check(outputs), torch.from_numpy(class_weights(counts, gamma)))
        first, last = (
            np.abs(problem.value_and_gradient(x)[1]).max()
            for x in (np.repeat([1.0, 0.0], 10), np.concatenate([fitted.omega_, fitted.beta_]))
        )
        assert fitted.result_.converged
        assert last <= 1.0001e-5 * first
        assert fitted.result_.gradient == pytest.approx(last / first, rel=1e-4)


def test_a_path_of_gammas_with_sgd_is_one_training_for_each():
    logits, y, counts, _ = problem_data()
    method = MARC(solver="sgd", max_iter=20, batch_size=16)
    path = method.fit_path(Outputs(y, counts, logits=logits), [0.3, 1.2])
    for gamma, fitted in path.items():
        alone = clone(method).set_params(gamma=gamma).fit(logits, y)
        np.testing.assert_array_equal(fitted.omega_, alone.omega_)


def test_gradients_of_many_class_weights_come_from_one_pass():
    logits, y, counts, norms = problem_data()
    data = from_arrays(logits, y, weight_norms=norms)
    x = np.random.default_rng(3).normal(0.5, 0.4, 8)
    plain = MARC(ridge=0.01).problem(data, torch.from_numpy(data.frequency))
    factors = np.stack([class_weights(counts, gamma) for gamma in (0.0, 0.7, 1.9)])
    together = plain.gradients(x, factors)
    assert together.shape == (3, 8)
    for row, weights in zip(together, factors, strict=True):
        alone = MARC(ridge=0.01).problem(data, torch.from_numpy(weights))
        for expected in (alone, plain.weighing(weights)):
            value, gradient = expected.value_and_gradient(x)
            assert value == pytest.approx(alone.value_and_gradient(x)[0], rel=1e-12)
            np.testing.assert_allclose(row, gradient, rtol=1e-9, atol=1e-12)
    plain.shifts = False
    np.testing.assert_array_equal(plain.gradients(x, factors)[:, 4:], 0)
    np.testing.assert_array_equal(plain.gradients(x, factors)[:, :4], together[:, :4])


def test_gamma_auto_chooses_as_trying_all_would(cifar_features):
    data = cifar_features
    outputs = Outputs(data["y"], np.bincount(data["y"]), logits=data["views"][0], head_weight=data["weight"])
    held_out = data["test"][::4], data["test_y"][::4]
    auto = MARC("auto").fit(data["views"][0], data["y"], weight_norms=data["norms"], validation=held_out)
    scores = {}
    for gamma, fitted in MARC().fit_path(outputs).items():
        right = fitted.predict(held_out[0]) == held_out[1]
        scores[gamma] = np.mean([right[held_out[1] == c].mean() for c in range(10)])
    assert scores[auto.gamma_] >= max(scores.values()) - 0.002
    assert auto.result_.gradient <= 1e-5


def test_gamma_auto_without_held_out_outputs_is_refused():
    logits, y, _, _ = problem_data()
    with pytest.raises(UserError, match=r"needs held-out outputs.*overconfident"):
        MARC(gamma="auto").fit(logits, y)


def test_a_path_of_gammas_checks_its_settings():
    logits, y, _, _ = problem_data()
    with pytest.raises(UserError, match="ridge must be a number, at least 0"):
        MARC(ridge=-1).fit_path(Outputs(y, np.bincount(y), logits=logits), [0.5])
