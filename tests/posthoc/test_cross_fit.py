"""Cross-fitting: folds, and heads with a given training loss."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.errors import UserError
from longtail.posthoc.class_statistics import class_statistics
from longtail.posthoc.cross_fit import _stratified, cross_fit, head_of_loss, mean_loss
from longtail.posthoc.inputs import from_arrays

from .conftest import FEATURES, LABELS, LOGITS, RNG, TARGET


def test_folds_leave_single_samples_where_they_are():
    labels = np.array([0] * 7 + [1] * 4 + [2] * 2 + [3])
    folds = _stratified(labels, 3, 0)
    held = np.concatenate(folds)
    assert sorted(held) == list(range(13))  # all but the only sample of its class
    for label in range(3):
        assert np.ptp([np.sum(labels[fold] == label) for fold in folds]) <= 1
    assert any(list(one) != list(two) for one, two in zip(folds, _stratified(labels, 3, 1), strict=True))
    features = RNG.normal(size=(14, 3))
    data = from_arrays(RNG.normal(size=(14, 4)), labels, features=features)
    made = cross_fit(data, features, lambda part, inputs, statistics: {})
    assert len(made) == 3  # the smallest class that can be left out has two samples
    full = np.repeat([0, 1], 9)
    many = from_arrays(RNG.normal(size=(18, 2)), full, features=RNG.normal(size=(18, 3)))
    assert len(cross_fit(many, many.features, lambda part, inputs, statistics: {})) == 5
    four = from_arrays(RNG.normal(size=(13, 2)), np.repeat([0, 1], [9, 4]), features=RNG.normal(size=(13, 3)))
    assert len(cross_fit(four, four.features, lambda part, inputs, statistics: {})) == 4
    scarce = from_arrays(RNG.normal(size=(4, 3)), [0, 0, 1, 2], features=RNG.normal(size=(4, 3)))
    with pytest.raises(UserError, match="two classes with at least two samples each"):
        cross_fit(scarce, scarce.features, lambda part, inputs, statistics: {})


@pytest.mark.parametrize("loss", [1.2, 0.8, 0.3])
def test_a_head_is_found_by_its_loss(loss):
    statistics = class_statistics(FEATURES, TARGET, 4)
    head = head_of_loss(FEATURES, TARGET, statistics, loss)
    reached = F.cross_entropy(head.scores(torch.from_numpy(FEATURES)), TARGET).item()
    best = F.cross_entropy(head_of_loss(FEATURES, TARGET, statistics, 0.0).scores(torch.from_numpy(FEATURES)), TARGET)
    assert reached == pytest.approx(max(loss, best.item()), rel=1e-3)


def test_a_loss_of_chance_is_that_of_a_head_without_an_opinion():
    head = head_of_loss(FEATURES, TARGET, class_statistics(FEATURES, TARGET, 4), 2.0)
    assert not head.weight.any()
    assert not head.bias.any()
    assert mean_loss(from_arrays(LOGITS, LABELS)) == pytest.approx(
        F.cross_entropy(torch.from_numpy(LOGITS), TARGET).item(), rel=1e-5
    )
