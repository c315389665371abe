"""Cross-fitting: folds, and heads with a given training loss."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.errors import UserError
from longtail.posthoc.halo.unseen import cross_fit, head_of_loss
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.solver.linear import class_statistics

from .conftest import FEATURES, LABELS, LOGITS, RNG, TARGET


def test_cross_fitting_needs_samples_to_leave_out():
    scarce = from_arrays(RNG.normal(size=(4, 3)), [0, 0, 1, 2], features=RNG.normal(size=(4, 3)))
    with pytest.raises(UserError, match="two classes with at least two samples each"):
        cross_fit(scarce, scarce.features, lambda part, inputs, statistics: {})


def test_heads_of_a_fold_are_fitted_on_the_other_samples():
    """As on a training set with the counts of these samples and the head that was fitted on them."""
    data = from_arrays(LOGITS, LABELS, features=FEATURES, class_counts=[90, 50, 30, 20])
    given = []
    folds = cross_fit(data, FEATURES, lambda train, inputs, statistics: given.append((train, inputs)) or {})
    for fold, (train, inputs) in zip(folds, given, strict=True):
        kept = np.setdiff1d(np.arange(19), fold.left_out)
        np.testing.assert_array_equal(inputs, FEATURES[kept])
        assert train.class_counts.tolist() == np.bincount(LABELS[kept], minlength=4).tolist()
        assert train.weight_norms.tolist() == [1, 1, 1, 1]
        expected = FEATURES[kept] @ fold.model_head.weight.T + fold.model_head.bias
        np.testing.assert_allclose(train.rows.read(slice(None)), expected, rtol=1e-4, atol=1e-5)


def test_the_simplest_head_is_that_of_the_first_ridge():
    """A loss just below that of chance is reached in the first stage: mean cross-entropy plus 0.2 tr(A P A')."""
    statistics = class_statistics(FEATURES, TARGET, 4)
    inputs = torch.from_numpy(FEATURES - statistics.centre)
    rows = torch.cat([inputs, torch.ones(19, 1)], 1)
    variance = np.trace(statistics.covariance) / 3
    penalty = torch.tensor([variance] * 3 + [1.0])
    matrix = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([matrix], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(rows @ matrix.T, TARGET) + 0.5 * 0.4 * (penalty * matrix.square()).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = matrix.detach().numpy()[:, :3]
    found = head_of_loss(FEATURES, TARGET, statistics, 1.38).weight
    scale = np.linalg.norm(found) / np.linalg.norm(expected)
    np.testing.assert_allclose(found, scale * expected, atol=2e-3 * np.abs(found).max())
