"""The candidates of `Auto`: how they are fitted, compared and chosen."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning

from longtail import CRT, HALO, MARC
from longtail.posthoc.candidates import Candidate, Trial, _methods, _refitted, best_scale
from longtail.posthoc.inputs import from_arrays, from_outputs

from .conftest import FEATURES, LABELS, LOGITS, RNG, TARGET, outputs


def test_the_best_scale_is_that_of_the_greatest_likelihood():
    weights = RNG.uniform(0.5, 2, 19)
    offset = torch.from_numpy(np.log([0.4, 0.3, 0.2, 0.1]))
    found = best_scale(torch.from_numpy(LOGITS), TARGET, offset, weights)

    def loss(scale):
        losses = F.cross_entropy(scale * torch.from_numpy(LOGITS) + offset, TARGET, reduction="none")
        return float(torch.from_numpy(weights) @ losses)

    assert loss(found) < min(loss(0.98 * found), loss(1.02 * found))
    right, wrong = 30.0 * torch.eye(2), -30.0 * torch.eye(2)
    assert best_scale(right.double(), torch.arange(2), torch.zeros(2), np.ones(2)) <= 20
    assert best_scale(wrong.double(), torch.arange(2), torch.zeros(2), np.ones(2)) == pytest.approx(0.05, rel=0.02)


def trial(*likelihoods):
    """Candidates with these log-likelihoods on equally weighted samples."""
    made = [Candidate(str(n), MARC(), np.zeros(2), np.array(one), np.ones(4)) for n, one in enumerate(likelihoods)]
    return Trial(made, np.full(4, 0.25))


def test_the_model_stays_unless_something_is_surely_better():
    as_it_is = [-1.0, -1.0, -1.0, -1.0]
    assert trial(as_it_is, [-0.5, -0.5, -0.5, -0.4]).chosen.name == "1"
    assert trial(as_it_is, as_it_is).chosen.name == "0"  # better by nothing
    gain, error = trial(as_it_is, [-1.0, 0.0, -1.0, 0.0]).difference(
        *(Candidate("", MARC(), np.zeros(2), np.array(one), np.ones(4)) for one in ([-1.0, 0, -1, 0], as_it_is))
    )
    assert (gain, error) == pytest.approx((0.5, 0.25))
    assert trial(as_it_is, [-1.0, 0.0, -1.0, 0.0]).chosen.name == "0"  # by two errors, not by more
    nearly = [-0.5, -0.5, -0.5, -0.4]
    best = [-0.4, -0.6, -0.5, -0.3]
    assert trial(as_it_is, nearly, best).chosen.name == "1"  # the simplest within one error of the best
    assert trial(as_it_is, nearly, [-0.1, -0.1, -0.1, -0.05]).chosen.name == "2"


def test_candidates_need_features_on_both_sides_for_a_new_classifier():
    plain, full = from_arrays(LOGITS, LABELS), from_arrays(LOGITS, LABELS, features=FEATURES)

    def names(*given):
        return [name for name, _ in _methods(*given)]

    simple = ["softmax", "logit-adjustment", "marc"]
    assert names(full, full) == [*simple, "crt", "halo"]
    assert names(full, plain) == names(plain, full) == names(plain, plain) == [*simple, "halo"]
    assert names(None, full) == simple


def test_a_new_classifier_begins_small():
    """As `nn.Linear` does: within one by the root of the width. One step with a tiny rate leaves it there."""
    fitted = CRT("sgd", max_iter=1, lr=1e-9, ridge=0.0).fit(LOGITS, LABELS, features=np.tile(FEATURES, 8))
    assert 0.15 < np.abs(fitted.weight_).max() <= 1 / math.sqrt(24) + 1e-6
    assert np.abs(fitted.bias_).max() < 1e-6
    other = CRT("sgd", max_iter=1, lr=1e-9, ridge=0.0, seed=1).fit(LOGITS, LABELS, features=np.tile(FEATURES, 8))
    assert (other.weight_ != fitted.weight_).any()


def test_a_fit_is_done_again_with_two_classes_and_not_with_one():
    train, held_out = from_outputs(outputs()), from_outputs(outputs("validation", seed=3))
    halo = HALO().fit_checked(train, held_out)
    two = held_out.part(np.flatnonzero(LABELS < 2))
    assert _refitted(halo, train, two).numbers_ != halo.numbers_
    assert _refitted(halo, train, held_out.part(np.flatnonzero(LABELS < 1))) is halo


def test_a_new_classifier_gets_its_passes():
    """1,000 passes unless told otherwise; what is told is obeyed."""
    with pytest.warns(ConvergenceWarning, match="after 3 passes"):
        CRT(max_iter=3, tolerance=1e-9).fit(LOGITS, LABELS, features=FEATURES)
    assert CRT(tolerance=1e-7, ridge=0.1).fit(LOGITS, LABELS, features=FEATURES).result_.converged
    assert CRT("sgd", max_iter=4).fit(LOGITS, LABELS, features=FEATURES).n_iter_ == 4
    assert MARC(solver="sgd", max_iter=5).fit(LOGITS, LABELS).n_iter_ == 5
    with pytest.warns(ConvergenceWarning, match="after 2 passes"):
        MARC(max_iter=2, tolerance=1e-12).fit(LOGITS, LABELS)
