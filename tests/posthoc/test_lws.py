import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail import MARC
from longtail.outputs.rows import LogitRows
from longtail.posthoc import LWS
from longtail.posthoc.solver.affine import AffineProblem


def test_logits_loss_and_gradient_agree_with_the_authors_code(golden):
    for case in golden("lws"):
        logits = case["features"] @ case["fc_weight"].T + case["fc_bias"]
        method = LWS()
        method.scale_, method.shift_ = case["scales"].ravel(), np.zeros(case["scales"].size)
        method.n_features_in_ = method.scale_.size
        np.testing.assert_allclose(method.transform(logits), case["logits"], rtol=1e-9)
        size, classes = logits.shape
        problem = AffineProblem(
            LogitRows(logits),
            torch.from_numpy(case["target"]),
            torch.full((size,), 1 / size, dtype=torch.float64),
            torch.ones(classes),
            ridge=0.0,
            centre=np.zeros(2 * classes),
            shifts=False,
        )
        value, gradient = problem.value_and_gradient(np.concatenate([method.scale_, np.zeros(classes)]))
        assert value == pytest.approx(float(case["ce_loss"]), rel=1e-6)
        expected = case["grad_scales"].ravel()
        np.testing.assert_allclose(gradient[:classes], expected, atol=1e-6 * np.abs(expected).max())
        assert (gradient[classes:] == 0).all()


def test_the_optimum_is_that_of_class_balanced_cross_entropy():
    from scipy.optimize import minimize

    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), [60, 20, 5])
    logits = rng.normal(size=(85, 3)) + 1.5 * np.eye(3)[y] + [1, 0, -1]

    def loss(scale):
        losses = F.cross_entropy(torch.from_numpy(logits * scale), torch.from_numpy(y), reduction="none").numpy()
        return np.mean([losses[y == c].mean() for c in range(3)]) + 0.5 * 0.01 * (10 / 3) * (scale - 1) @ (scale - 1)

    best = minimize(loss, np.ones(3), options={"gtol": 1e-9})
    method = LWS(ridge=0.01, tolerance=1e-7).fit(logits, y)
    np.testing.assert_allclose(method.scale_, best.x, atol=1e-4)
    assert (method.shift_ == 0).all()


def test_equal_counts_make_it_marc_without_shifts():
    """With equal counts both weigh samples equally; a strong head start of the shifts is all that differs."""
    rng = np.random.default_rng(1)
    y = np.arange(90) % 3
    logits = rng.normal(size=(90, 3)) + np.eye(3)[y]
    lws, marc = LWS().fit(logits, y), MARC().fit(logits, y)
    assert marc.result_.value <= lws.result_.value
