"""Choosing a setting on held-out samples, and ties."""

import numpy as np
import pytest

from longtail import MARC
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment, TauNorm
from longtail.posthoc.affine import require_validation
from longtail.posthoc.inputs import from_arrays

from .conftest import LABELS


def test_choosing_needs_samples_of_the_smaller_classes():
    def held(labels):
        made = from_arrays(np.zeros((len(labels), 4)), labels, class_counts=[5, 90, 20, 50], need_every_class=False)
        return require_validation(made, "tau")

    held([1, 3, 2])  # class 2 belongs to the smaller half
    held([1, 0])
    with pytest.raises(UserError, match="larger classes"):
        held([1, 3, 3])


@pytest.mark.parametrize("method", [LogitAdjustment("auto"), TauNorm("auto")], ids=str)
def test_of_equally_good_taus_the_nearest_to_one_is_taken(method):
    """Logits so clear that no tau changes a decision."""
    logits = 1e4 * np.eye(4)[LABELS]
    method.fit(logits, LABELS, weight_norms=[1, 1.1, 1.2, 1.3], validation=(logits, LABELS))
    assert method.tau_ == 1.0


@pytest.mark.filterwarnings("ignore:the held-out logits are 1e.03 times as large")  # so clear are they
def test_of_equally_good_gammas_the_papers_is_taken():
    logits = 4 * np.eye(4)[LABELS]
    assert MARC("auto").fit(logits, LABELS, validation=(1e3 * logits, LABELS)).gamma_ == 1.2
