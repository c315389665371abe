"""A trial of methods: how they are fitted and scored on held-out samples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail.errors import UserError
from longtail.posthoc.candidates import _likelihood, target_weights, try_candidates
from longtail.posthoc.inputs import from_arrays, from_outputs
from longtail.posthoc.priors import best_scale

from .conftest import LABELS, LOGITS, RNG, TARGET, outputs


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


def test_every_method_is_tried_and_halo_is_chosen():
    train, held_out = from_outputs(outputs()), from_outputs(outputs("validation", seed=3))
    scarce = held_out.subset(np.flatnonzero((LABELS == 0) | (np.arange(len(LABELS)) == np.argmax(LABELS == 1))))
    trial = try_candidates(train, scarce, "uniform")
    assert [one.name for one in trial.candidates] == ["softmax", "logit-adjustment", "marc", "crt", "halo"]
    assert trial.chosen.name == "halo"


def test_a_candidate_is_scored_at_the_temperature_of_the_other_folds():
    """Over the classes that have held-out samples and may occur; class 2 may not, class 4 has none."""
    rng = np.random.default_rng(5)
    labels = np.array([0] * 6 + [1] * 5 + [2] * 4 + [3] * 5)
    scores = rng.normal(size=(20, 5)) + 2 * np.eye(5)[labels]
    held_out = from_arrays(scores, labels, class_counts=[9, 9, 9, 9, 9], need_every_class=False)
    target = np.log([0.4, 0.2, 1.0, 0.3, 0.1])
    target[2] = -np.inf
    folds, weights = [np.arange(fold, 20, 3) for fold in range(3)], rng.uniform(0.5, 2, 20)
    found = _likelihood(torch.from_numpy(scores), target, held_out, weights, folds)
    expected, kept, place = np.zeros(20), labels != 2, {0: 0, 1: 1, 3: 2}
    codes = torch.tensor([place.get(label, 0) for label in labels.tolist()])
    columns, offset = torch.from_numpy(scores[:, [0, 1, 3]]), torch.from_numpy(target[[0, 1, 3]])
    for fold in folds:
        others = kept & ~np.isin(np.arange(20), fold)
        scale = best_scale(columns[others], codes[others], offset, weights[others])
        for row in fold[kept[fold]]:
            expected[row] = (scale * columns[row] + offset).log_softmax(0)[codes[row]]
    np.testing.assert_allclose(found, expected)
    alone = _likelihood(torch.from_numpy(scores), target, held_out, weights, [np.arange(20)])
    plain = (columns + offset).log_softmax(1)[torch.arange(20), codes]  # nothing to fit a temperature on
    np.testing.assert_allclose(alone[kept], plain.numpy()[kept])


def test_weights_of_samples_follow_the_target_prior():
    labels = np.array([0, 0, 0, 1, 2, 2])
    held_out = from_arrays(np.zeros((6, 4)), labels, class_counts=[9, 9, 9, 9], need_every_class=False)
    weights = target_weights(held_out, np.log([0.2, 0.4, 0.1, 0.3]))
    np.testing.assert_allclose(weights, np.array([0.2 / 3] * 3 + [0.4] + [0.05] * 2) / 0.7)
    with pytest.raises(UserError, match="target prior is 0 for every class that has held-out samples"):
        target_weights(held_out, np.array([-np.inf, -np.inf, -np.inf, 0.0]))
    with pytest.raises(UserError, match="held-out samples are of 1 class; two classes at least"):
        target_weights(held_out.subset(np.array([0, 1])), np.zeros(4))
    target_weights(held_out.subset(np.array([0, 3])), np.zeros(4))  # two are enough


def test_without_training_outputs_two_samples_of_every_class_are_needed():
    labels = np.array([0] * 5 + [1] * 2)
    enough = from_arrays(RNG.normal(size=(7, 2)), labels)
    trial = try_candidates(None, enough, "uniform")
    assert [one.name for one in trial.candidates] == ["softmax", "logit-adjustment", "marc"]
    assert trial.mean(trial.chosen) == max(map(trial.mean, trial.candidates))
    with pytest.raises(UserError, match="class 1 has 1 held-out samples; at least 2 of every class"):
        try_candidates(None, enough.subset(np.arange(6)), "uniform")


def test_the_unchanged_model_only_drops_classes_of_weight_zero():
    train, held_out = from_outputs(outputs()), from_outputs(outputs("validation", seed=3))
    weights = np.array([3.0, 0.0, 2.0, 1.0])
    softmax, adjusted, *_ = try_candidates(train, held_out, weights).candidates
    assert softmax.target_shift.tolist() == [0.0, -np.inf, 0.0, 0.0]
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(adjusted.target_shift, np.log(weights / 6))
    assert softmax.method.n_parameters_ == 0
    logits = held_out.rows.read(slice(None)).numpy()
    for candidate in (softmax, adjusted):
        moved = candidate.method.transform(logits) + np.where(weights == 0, -1e9, candidate.target_shift)
        np.testing.assert_array_equal(candidate.hits, moved.argmax(1) == held_out.labels.numpy())
