"""Where fits start, what they are given if nothing is said, and the edges of their checks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning

from longtail import HALO, MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc import (
    LWS,
    DisAlign,
    MatrixScaling,
    PlattScaling,
    TemperatureScaling,
    VectorScaling,
)
from longtail.posthoc.marc import class_weights
from longtail.posthoc.priors import like_training

RNG = np.random.default_rng(11)
LABELS = np.array([0] * 9 + [1] * 5 + [2] * 3 + [3] * 2)
COUNTS = np.bincount(LABELS)
FEATURES = (RNG.normal(size=(19, 3)) + np.eye(4)[LABELS][:, :3]).astype(np.float32)
LOGITS = (RNG.normal(size=(19, 4)) + np.eye(4)[LABELS]).astype(np.float32)
HELD = (RNG.normal(size=(19, 4)) + np.eye(4)[LABELS]).astype(np.float32)
NORMS = np.array([2.0, 1.5, 1.0, 0.5])


@pytest.mark.parametrize(
    "method",
    [MARC(max_iter=1), LWS(max_iter=1), VectorScaling(max_iter=1), PlattScaling(max_iter=1)],
    ids=lambda method: type(method).__name__,
)
def test_a_fit_starts_with_the_classifier_as_it_is(method):
    """One pass computes the gradient and moves nothing."""
    with pytest.warns(ConvergenceWarning, match="after 1 passes"):
        method.fit(LOGITS, LABELS)
    np.testing.assert_array_equal(method.scale_, 1)
    np.testing.assert_array_equal(method.shift_, 0)


def test_a_matrix_and_a_temperature_start_at_the_identity():
    with pytest.warns(ConvergenceWarning, match="after 1 passes"):
        matrix = MatrixScaling(max_iter=1).fit(LOGITS, LABELS)
    np.testing.assert_array_equal(matrix.matrix_, np.eye(4))
    np.testing.assert_array_equal(matrix.shift_, 0)
    with pytest.warns(ConvergenceWarning, match="after 1 passes"):
        assert TemperatureScaling(max_iter=1).fit(LOGITS, LABELS).temperature_ == 1


@pytest.mark.parametrize("divide_by", ["batch", "weights"])
@pytest.mark.parametrize(("form", "extra"), [("paper", 0.0), ("release", 1.0)])
def test_two_steps_of_disalign_are_those_of_its_formula(form, extra, divide_by):
    """All samples in every batch: momentum 0.9, weight decay, a rate that falls along a cosine."""
    made = DisAlign(form=form, divide_by=divide_by, max_iter=2, batch_size=19, lr=0.2, weight_decay=0.3)
    made.fit(LOGITS, LABELS, features=FEATURES)
    weights = torch.from_numpy(class_weights(COUNTS, 1.2)).float()
    logits, features, target = torch.from_numpy(LOGITS), torch.from_numpy(FEATURES), torch.from_numpy(LABELS)
    numbers = torch.cat([torch.full((4,), extra), torch.zeros(4), torch.full((3,), 0.1), torch.zeros(1)])
    velocity = torch.zeros(12)
    decay = 0.3 * (weights[target].mean() if divide_by == "batch" else 1)
    for rate in (0.2, 0.1):
        numbers = numbers.detach().requires_grad_()
        scale, shift, direction, offset = numbers.split([4, 4, 3, 1])
        sure = (features @ direction + offset).sigmoid().unsqueeze(1)
        mixed = sure * ((scale + 1) * logits + shift) + (1 - sure) * logits
        loss = F.cross_entropy(mixed, target, weights, reduction="sum")
        loss = loss / (19 if divide_by == "batch" else weights[target].sum())
        loss.backward()
        velocity = 0.9 * velocity + numbers.grad + decay * numbers.detach()
        numbers = numbers - rate * velocity
    scale, shift, direction, offset = numbers.detach().split([4, 4, 3, 1])
    np.testing.assert_allclose(made.scale_, scale + 1, rtol=1e-4)
    np.testing.assert_allclose(made.shift_, shift, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(made.confidence_weight_, direction, rtol=1e-4, atol=1e-6)
    assert made.confidence_bias_ == pytest.approx(offset.item(), rel=1e-4)
    assert made.result_.value == pytest.approx(loss.item(), rel=1e-4)
    sure = torch.sigmoid(features @ direction + offset).unsqueeze(1)
    expected = sure * ((scale + 1) * logits + shift) + (1 - sure) * logits
    np.testing.assert_allclose(made.transform(LOGITS, FEATURES), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong", [(), (HELD, LABELS, FEATURES, 1), "abc", 5, {"logits": HELD}, HELD], ids=lambda one: type(one).__name__
)
def test_what_validation_cannot_be(wrong):
    with pytest.raises(UserError, match=r"validation must be Outputs, or \(logits, y\), or \(logits, y, features\)"):
        HALO().fit(LOGITS, LABELS, validation=wrong)


def test_forms_of_validation_are_the_same():
    held = Outputs(LABELS, COUNTS, logits=HELD, split="validation")
    fitted = [HALO().fit(LOGITS, LABELS, validation=one) for one in (held, (held,), (HELD, LABELS), [HELD, LABELS])]
    for other in fitted[1:]:
        assert other.numbers_ == fitted[0].numbers_
    known = HALO().fit(LOGITS, LABELS, features=FEATURES, validation=(HELD, LABELS, FEATURES + 1))
    assert list(known.heads_) == ["lda", "balanced"]


def test_halo_on_logits_alone_has_a_number_for_each_name():
    fitted = HALO().fit(LOGITS, LABELS, validation=(HELD, LABELS))
    assert list(fitted.numbers_) == ["model", "prior"]
    assert fitted.n_parameters_ == 2
    assert not fitted.log_norms_.any()
    normed = HALO(model_prior="train").fit(LOGITS, LABELS, weight_norms=NORMS, validation=(HELD, LABELS))
    assert list(normed.numbers_) == ["model", "prior", "norms"]
    assert normed.n_parameters_ == 3
    log = np.log(NORMS)
    np.testing.assert_allclose(normed.log_norms_, (log - log.mean()) / log.std())
    prior = np.log(COUNTS / 19)
    numbers = normed.numbers_
    expected = numbers["model"] * HELD + (numbers["prior"] - 0.5) * prior + numbers["norms"] * normed.log_norms_
    np.testing.assert_allclose(normed.transform(HELD), expected, rtol=1e-4, atol=1e-5)
    towards = normed.with_target_prior([1, 2, 3, 4])
    np.testing.assert_allclose(towards.transform(HELD), expected + np.log([0.1, 0.2, 0.3, 0.4]), rtol=1e-4, atol=1e-5)


def test_halo_mixes_differences_from_the_models_own_logits():
    fitted = HALO(model_prior="train").fit(LOGITS, LABELS, features=FEATURES, validation=(HELD, LABELS, FEATURES + 1))
    numbers, inputs = fitted.numbers_, torch.from_numpy(FEATURES).double()
    scores = {name: head.scores(inputs).numpy() for name, head in fitted.heads_.items()}
    mixed = numbers["model"] * LOGITS + sum(numbers[name] * (scores[name] - LOGITS) for name in scores)
    expected = mixed + (numbers["prior"] - 0.5) * np.log(COUNTS / 19)
    np.testing.assert_allclose(fitted.transform(LOGITS, FEATURES), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("own", "counts", "answer"),
    [
        ([110, 90], [1000, 1000], True),  # nine off of a hundred, beyond rounding, is chance
        ([19, 5], [100, 100], True),  # six off of twelve, twice: three for each class
        ([20, 4], [100, 100], False),
        ([1, 1, 30], [1, 1, 300], True),
        ([4, 1, 30], [1, 1, 300], False),
    ],
)
def test_what_is_like_training(own, counts, answer):
    assert like_training(np.array(own), np.array(counts)) is answer


@pytest.mark.parametrize("counts", [[1e308, 1, 1], [5e-324, 1, 1], [1e13, 10, 10]])
def test_counts_that_no_data_set_has_are_refused(counts):
    """They would let all smaller classes vanish in sums: every shift zero, and called converged."""
    logits, labels = 3 * np.eye(3)[np.arange(30) % 3], np.arange(30) % 3
    with pytest.raises(UserError, match="class_counts go from .* no data set has such numbers of samples"):
        MARC().fit(logits, labels, class_counts=counts)
    if counts[0] > 1:
        with pytest.raises(UserError, match="class_counts go from"):
            Outputs(labels, np.array(counts), logits=logits)


def test_calibrated_logits_are_finite_or_refused():
    method = MARC().fit(LOGITS, LABELS)
    method.scale_, method.shift_ = np.ones(4), np.zeros(4)
    largest = np.full((1, 4), np.finfo(np.float32).max, dtype=np.float32)
    assert method.transform(largest).tolist() == largest.tolist()
    method.scale_ = np.full(4, 2.0)
    with pytest.raises(UserError, match="MARC gives logits that are not finite"):
        method.transform(largest)
