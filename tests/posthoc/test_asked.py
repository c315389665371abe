"""What methods ask of the parts below them: settings that are passed on, types, the order of solves."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longtail import CRT, HALO, MARC, DisAlign
from longtail.errors import UserError
from longtail.posthoc import crt, heads, marc
from longtail.posthoc.candidates import Unchanged, _shift_of
from longtail.posthoc.class_statistics import class_statistics
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.linear import LinearProblem
from longtail.posthoc.marc import _Known, class_weights
from longtail.posthoc.selection import GAMMAS
from longtail.posthoc.solver import Solution

from .conftest import FEATURES, LABELS, LOGITS, TARGET

COUNTS = np.bincount(LABELS)


class Asked(Exception):
    """Stands for the work that would follow."""


def asked_for(monkeypatch, module, name, call):
    """The named arguments with which a method calls a part of the package."""
    told = {}

    def listen(*given, **more):
        told.update(more)
        raise Asked

    monkeypatch.setattr(module, name, listen)
    with pytest.raises(Asked):
        call()
    return told


@pytest.mark.parametrize(("tolerance", "exact"), [(1e-5, False), (9e-6, True)])
def test_answers_finer_than_float32_are_worked_in_float64(tolerance, exact, monkeypatch):
    statistics = class_statistics(FEATURES, TARGET, 4)
    calls = {
        crt: lambda: CRT(tolerance=tolerance).fit(LOGITS, LABELS, features=FEATURES),
        heads: lambda: heads.balanced_head(FEATURES, TARGET, statistics, tolerance=tolerance),
    }
    for module, call in calls.items():
        assert asked_for(monkeypatch, module, "LinearProblem", call)["exact"] is exact
    assert HALO(tolerance=tolerance)._exact is exact


@pytest.mark.parametrize(("schedule", "warmup"), [("paper", 0), ("release", 800)])
def test_stage_two_of_marc_is_told_its_settings(schedule, warmup, monkeypatch):
    method = MARC(solver="sgd", schedule=schedule, ridge=0.3, batch_size=7, lr=0.2, divide_by="weights", seed=5)
    told = asked_for(monkeypatch, marc, "train_affine", lambda: method.fit(LOGITS, LABELS))
    centre = told.pop("centre")
    assert centre.tolist() == [0] * 8
    settings = {"steps": 2000, "batch_size": 7, "lr": 0.2, "warmup": warmup, "weight_decay": 0.3}
    assert told == {**settings, "divide_by": "weights", "seed": 5}


def test_sgd_weighs_a_set_that_is_not_the_training_set(monkeypatch):
    """Class weights times what a sample stands for: (n_c / N) / (m_c / M)."""
    counts = np.array([500, 80, 40, 10])
    expected = class_weights(counts, 1.2) * (counts / counts.sum()) / (COUNTS / 19)
    seen = []

    def listen(data, weights, **more):
        seen.append(weights.numpy())
        raise Asked

    monkeypatch.setattr(marc, "train_affine", listen)
    with pytest.raises(Asked):
        MARC(solver="sgd").fit(LOGITS, LABELS, class_counts=counts)
    np.testing.assert_allclose(seen[0], expected)
    one, other = (
        DisAlign(max_iter=3, batch_size=19).fit(LOGITS, LABELS, features=FEATURES, class_counts=given)
        for given in (counts, 7 * counts)
    )
    np.testing.assert_allclose(one.scale_, other.scale_)
    with monkeypatch.context() as patch:
        patch.setattr("longtail.posthoc.disalign.class_weights", lambda given, gamma: expected / own_frequency(counts))
        again = DisAlign(max_iter=3, batch_size=19).fit(LOGITS, LABELS, features=FEATURES, class_counts=counts)
    np.testing.assert_allclose(again.scale_, one.scale_, rtol=1e-5)


def own_frequency(counts):
    return (counts / counts.sum()) / (COUNTS / 19)


def test_steps_are_counted_as_solved():
    for method in (CRT("sgd", max_iter=2), MARC(solver="sgd", max_iter=2), DisAlign(max_iter=2)):
        method.fit(LOGITS, LABELS, features=FEATURES)
        assert (method.result_.converged, method.n_iter_, method.result_.gradient) == (True, 2, None)
    weight = CRT("sgd", max_iter=1, lr=1e-9).fit(LOGITS, LABELS, features=FEATURES).weight_
    assert weight.min() < 0 < weight.max()


def test_at_zero_every_class_of_a_linear_head_is_equally_curved():
    """L L' is the second moments by K plus the penalty."""
    statistics = class_statistics(FEATURES, TARGET, 4)
    penalty = np.diag([1.0, 2.0, 3.0, 0.1])
    weights = torch.full((19,), 1 / 19, dtype=torch.float64)
    problem = LinearProblem(FEATURES, TARGET, weights, statistics, penalty)
    expected = statistics.second_moments() / 4 + penalty
    np.testing.assert_allclose(problem.root @ problem.root.T, expected)
    np.testing.assert_allclose(problem.inverse @ problem.root, np.eye(4), atol=1e-12)
    problem.precondition(0.7)
    np.testing.assert_allclose(problem.root @ problem.root.T, 0.7 * statistics.second_moments() + penalty)
    assert problem.start.tolist() == [0.0] * 16


def solution(x, ahead=None):
    return Solution(np.array([x]), 0.0, True, 1, 0.0, 0.0, None if ahead is None else np.array([ahead]))


def test_what_other_gammas_tell():
    known = _Known(None, {}, {0.2: solution(1.0), 1.0: solution(5.0, ahead=3.0)})
    assert known.start(0.2).tolist() == [1]  # of an answer itself
    assert known.start(1.0).tolist() == [3]  # nearer to the optimum than where it stopped
    assert known.nearest(0.3) is known.answers[0.2]
    assert known.nearest(0.9) is known.answers[1.0]


def solved_in_order(monkeypatch, method, scores=None):
    order = []

    def solve(self, data, gamma, known=None, tolerance=None):
        order.append((gamma, tolerance))
        return Solution(np.repeat([1.0, gamma], 4), 0.0, True, 1, 0.0, 0.0)

    monkeypatch.setattr(MARC, "_solve", solve)
    if scores:
        monkeypatch.setattr(marc, "balanced_accuracy", lambda scale, shift, held_out: scores(shift[0]))
    return order


@pytest.mark.parametrize(
    ("best", "around"),
    [
        (0.0, [0.1, 0.2, 0.3]),
        (0.8, [0.5, 0.6, 0.7, 0.9, 1.0, 1.1]),
        (0.9, [0.5, 0.6, 0.7, 0.9, 1.0, 1.1]),
        (2.0, [1.7, 1.8, 1.9]),
    ],
)
def test_gammas_are_compared_coarsely_and_then_around_the_best(best, around, monkeypatch):
    method = MARC("auto")
    order = solved_in_order(monkeypatch, method, lambda gamma: -abs(gamma - best))
    method.fit(LOGITS, LABELS, validation=(LOGITS + 1, LABELS))
    tried = [gamma for gamma, _ in order]
    assert tried[:6] == [0.0, 0.4, 0.8, 1.2, 1.6, 2.0]
    assert tried[6:-1] == around
    assert tried[-1] == method.gamma_ == pytest.approx(best)
    assert {tolerance for _, tolerance in order[:-1]} == {3e-4}  # rough answers are enough to compare
    assert order[-1][1] is None
    np.testing.assert_allclose(method.beta_, method.gamma_)


def test_held_out_samples_are_scored_with_the_norms(monkeypatch):
    seen = []
    solved_in_order(monkeypatch, MARC("auto"), lambda shift: seen.append(shift) or 0.0)
    MARC("auto").fit(LOGITS, LABELS, weight_norms=[3.0, 1, 1, 1], validation=(LOGITS + 1, LABELS))
    assert seen[:3] == pytest.approx([0.0, 3 * 0.4, 3 * 0.8])


def test_a_path_of_gammas_begins_at_a_fifth(monkeypatch):
    order = solved_in_order(monkeypatch, MARC())
    MARC()._path(from_arrays(LOGITS, LABELS), GAMMAS)
    assert [gamma for gamma, _ in order] == [*GAMMAS[4::-1], *GAMMAS[5:]]
    order.clear()
    path = MARC()._path(from_arrays(LOGITS, LABELS), [2.0, 0.5, 2.0])
    assert [gamma for gamma, _ in order] == [0.5, 2.0]
    assert list(path) == [2.0, 0.5]


def test_results_just_within_single_precision_are_results():
    method = MARC()
    largest = float(np.finfo(np.float32).max)
    method.scale_ = np.array([largest, -largest, -np.inf])
    method._require_finite()
    for wrong in (2 * largest, np.inf, np.nan):
        method.scale_ = np.array([1.0, wrong])
        with pytest.raises(UserError, match=r"not finite \(scale_\)"):
            method._require_finite()
    method.scale_ = np.array([1.0])
    method.heads_ = {"lda": SimpleNamespace(weight=np.array([np.nan]), bias=np.zeros(1))}
    with pytest.raises(UserError, match=r"not finite \(weights of lda\)"):
        method._require_finite()


def test_calibrated_logits_are_finite_or_refused():
    method = MARC().fit(LOGITS, LABELS)
    method.scale_, method.shift_ = np.ones(4), np.zeros(4)
    largest = np.full((1, 4), np.finfo(np.float32).max, dtype=np.float32)
    assert method.transform(largest).tolist() == largest.tolist()
    method.scale_ = np.full(4, 2.0)
    with pytest.raises(UserError, match="MARC gives logits that are not finite"):
        method.transform(largest)


def test_the_unchanged_model_only_drops_classes():
    target = np.array([0.3, -np.inf, -2.0])
    assert _shift_of(Unchanged(), target).tolist() == [0.0, -np.inf, 0.0]
    assert _shift_of(MARC(), target) is target
    assert Unchanged().fit(LOGITS, LABELS).n_parameters_ == 0
