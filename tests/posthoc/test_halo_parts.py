"""Parts of HALO: what is said of held-out samples, what is remembered of them, and how they are read."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longtail import HALO
from longtail.posthoc import Auto, halo
from longtail.posthoc.auto import Candidate, Trial, Unchanged
from longtail.posthoc.halo.heads import spread, stack_heads
from longtail.posthoc.halo.unseen import Fold, fold_scores, model_scores
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.solver.linear import LinearHead, class_statistics

from .conftest import FEATURES, LABELS, LOGITS, RNG, TARGET, outputs


@pytest.mark.parametrize("features", [None, FEATURES])
def test_scores_are_those_of_the_model_and_of_the_heads(features):
    data = from_arrays(LOGITS, LABELS, features=features)
    heads = {name: LinearHead(RNG.normal(size=(4, 3)), RNG.normal(size=4)) for name in ("lda", "balanced")}
    ((rows, read),) = model_scores(data, heads if features is not None else {})
    assert rows == slice(0, 19)
    expected = [LOGITS] + [FEATURES @ head.weight.T + head.bias for head in heads.values() if features is not None]
    np.testing.assert_allclose(read(torch.float64), np.stack(expected).transpose(0, 2, 1), rtol=1e-5, atol=1e-6)
    assert read(torch.float32).dtype == torch.float32


def test_samples_of_a_fold_are_scored_by_its_heads():
    def head():
        return LinearHead(RNG.normal(size=(4, 3)), RNG.normal(size=4))

    folds = [Fold(np.arange(5, 9), head(), {"lda": head()}), Fold(np.arange(2), head(), {"lda": head()})]
    data = from_arrays(LOGITS, LABELS, features=FEATURES)
    found = list(fold_scores(folds, from_arrays(FEATURES, np.arange(19) % 3).rows, data.world))
    assert [rows for rows, _ in found] == [slice(0, 4), slice(4, 6)]  # one after the other
    for fold, (_, read) in zip(folds, found, strict=True):
        for head_of, scores in zip((fold.model_head, fold.heads["lda"]), read(torch.float64), strict=True):
            np.testing.assert_allclose(scores.T, FEATURES[fold.left_out] @ head_of.weight.T + head_of.bias, rtol=1e-5)


@pytest.mark.parametrize("more", [0, -1])
def test_scores_are_remembered_if_they_are_few(monkeypatch, more):
    """Three heads, 19 samples, 4 classes."""
    train, held_out = outputs(), outputs("validation", seed=3)
    fitted = HALO().fit(train, validation=held_out)
    monkeypatch.setattr(halo, "CACHED_SCORES", 3 * 19 * 4 + more)
    data = fitted._check(held_out)
    problem = fitted.mixture(fitted._check(train), data)
    assert (problem.batches() is problem.batches()) == (more == 0)
    again = fitted.refitted(fitted._check(train), data)
    assert list(again.numbers_.values()) == pytest.approx(list(fitted.numbers_.values()), rel=1e-4)


def test_norms_that_are_all_alike_have_no_number():
    alike = HALO().fit(LOGITS, LABELS, weight_norms=[2.0] * 4, validation=(LOGITS + 1, LABELS))
    assert list(alike.numbers_) == ["model", "prior"]
    nearly = HALO().fit(LOGITS, LABELS, weight_norms=[2.0, 2.0, 2.0, 2.0001], validation=(LOGITS + 1, LABELS))
    assert list(nearly.numbers_) == ["model", "prior", "norms"]


def test_heads_that_do_not_separate_classes_are_zero():
    """Features that are the same for all samples tell no classes apart; logits that are, have the width of one."""
    same = np.ones((19, 3), dtype=np.float32)
    data = from_arrays(LOGITS, LABELS, features=same)
    statistics = SimpleNamespace(means=np.zeros((4, 3)), centre=np.zeros(3), covariance=np.eye(3))
    statistics.second_moments = lambda: np.eye(4)
    made = stack_heads(data, same, statistics, 1e-3)
    assert not made["lda"].weight.any()
    flat = from_arrays(np.zeros((19, 4)), LABELS, features=FEATURES)
    for head in stack_heads(flat, FEATURES, class_statistics(FEATURES, TARGET, 4), 1e-3).values():
        rows = from_arrays(FEATURES @ head.weight.T + head.bias, LABELS).rows
        assert spread(rows, torch.ones(19, dtype=torch.float64)) == pytest.approx(1.0)


@pytest.mark.parametrize("processes", [1, 2])
def test_all_processes_take_the_choice_of_the_first(processes, monkeypatch):
    """Another process may have chosen otherwise by rounding; here the first one chose candidate 0."""
    train, held_out = (Auto()._check(outputs(split, seed=seed)) for split, seed in (("train", None), ("validation", 3)))
    method = Unchanged().fit_checked(train, held_out)
    told = {"first": -2.0, "last": -1.0}  # the last is surely better
    made = [Candidate(name, method, np.zeros(4), np.full(19, value), np.ones(19)) for name, value in told.items()]
    trial = Trial(made, np.full(19, 1 / 19))
    world = SimpleNamespace(size=processes, broadcast=lambda given: given[0].zero_())
    monkeypatch.setattr("longtail.posthoc.auto.try_candidates", lambda *given: trial)
    fitted = Auto()
    fitted._fit(SimpleNamespace(world=world), None)
    assert fitted.choice_ == ("last" if processes == 1 else "first")


def test_few_held_out_samples_are_pointed_out():
    many = np.concatenate([LOGITS, LOGITS + 1, LOGITS + 2])
    labels = np.concatenate([LABELS] * 3)
    few = " (few: the numbers, and so the confidence, stay near those usual for networks)"
    for number, text in ((50, ""), (49, few)):
        fitted = HALO().fit(LOGITS - 5, LABELS, validation=(many[:number], labels[:number]))
        assert fitted.held_out_ == f"logits alone; {number} held-out samples{text}"
        assert fitted.notes()[0] == f"fitted on {fitted.held_out_}"


@pytest.mark.parametrize("size", [1e13, 1e-13])
def test_logits_of_any_size_are_mixed_alike(size):
    """Beyond the range of products in float32 they are mixed in float64."""
    plain = HALO("train").fit(LOGITS, LABELS, validation=(LOGITS + 1, LABELS))
    scaled = HALO("train").fit(size * LOGITS, LABELS, validation=(size * (LOGITS + 1), LABELS))
    assert np.mean(scaled.predict(size * LOGITS) == plain.predict(LOGITS)) > 0.8  # the unit is found to a tenth
