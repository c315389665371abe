import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    precision_score,
    roc_auc_score,
)
from sklearn.metrics import confusion_matrix as sklearn_confusion

from longtail.errors import UserError
from longtail.metrics.confidence import Predictions, binned, expected_calibration_error, reliability, softmax
from longtail.metrics.scores import average_precision, evaluate, evaluate_predictions, shot_accuracy


def test_shots_agree_with_the_decoupling_authors_code(golden):
    for case in golden("shot_metrics"):
        metrics = evaluate_predictions(case["preds"], case["labels"], case["class_counts"])
        for ours, theirs in zip((metrics.many, metrics.medium, metrics.few), case["shot_acc_decoupling"], strict=True):
            # Their code says 0 for a group without classes; ours says none.
            assert ours == pytest.approx(theirs, abs=1e-12) if ours is not None else theirs == 0
        assert metrics.top1 == pytest.approx(float(case["mic_acc"]), abs=1e-12)
        # Their mean counts classes that are predicted but never occur; the sum is the same.
        occurring, counted = len(np.unique(case["labels"])), len(np.union1d(case["labels"], case["preds"]))
        assert metrics.macro_f1 * occurring / counted == pytest.approx(float(case["macro_f1"]), abs=1e-12)
        ours = [-1 if value is None else value for value in metrics.per_class]
        assert ours == pytest.approx(case["per_class_acc"], abs=1e-12)


@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(5, 200))
def test_scores_agree_with_scikit_learn(seed, classes, size):
    rng = np.random.default_rng(seed)
    labels, predictions = rng.integers(0, classes, (2, size))
    metrics = evaluate_predictions(predictions, labels, np.full(classes, 50))
    occurring = f1_score(labels, predictions, average="macro", labels=np.unique(labels))
    assert metrics.macro_f1 == pytest.approx(occurring)
    present = np.isin(predictions, labels)  # scikit-learn warns about predicted classes that do not occur
    if present.all():
        assert metrics.balanced == pytest.approx(balanced_accuracy_score(labels, predictions))
    expected = sklearn_confusion(labels, predictions, labels=np.arange(classes))
    assert (metrics.matrix() == expected).all()


def test_calibration_error_by_hand():
    probabilities = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]])
    labels = np.array([0, 1, 1, 0])
    # Ten bins: 0.9 and 0.8 and 0.7 and 0.55 each stand alone.
    expected = (abs(0.9 - 1) + abs(0.8 - 0) + abs(0.7 - 1) + abs(0.55 - 0)) / 4
    assert expected_calibration_error(probabilities, labels, bins=10) == pytest.approx(expected)
    share, confidence, accuracy = reliability(probabilities, labels, bins=2)
    assert share.tolist() == [0, 1]
    assert np.isnan(confidence[0])
    assert accuracy[1] == 0.5


def test_a_calibrated_model_has_no_calibration_error():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet([1, 1, 1], 200_000)
    labels = (rng.random((200_000, 1)) > probabilities.cumsum(1)).sum(1)
    assert expected_calibration_error(probabilities, labels) < 0.005


@given(st.integers(0, 10_000), st.integers(2, 6), st.floats(0.1, 100))
def test_nll_and_brier_agree_with_scikit_learn(seed, classes, scale):
    rng = np.random.default_rng(seed)
    logits, labels = scale * rng.normal(size=(50, classes)), rng.integers(0, classes, 50)
    metrics = evaluate(logits, labels, np.full(classes, 50))
    # scikit-learn's clips probabilities; logarithms of a softmax need no clipping.
    exact = -log_softmax(logits, axis=1)[np.arange(50), labels].mean()
    assert metrics.nll == pytest.approx(exact)
    truth = np.eye(classes)[labels]
    assert metrics.brier == pytest.approx(np.square(softmax(logits) - truth).sum(1).mean())
    if scale < 5:
        assert metrics.nll == pytest.approx(log_loss(labels, softmax(logits), labels=range(classes)))


def test_an_absent_class_that_is_predicted_does_not_lower_macro_f1():
    metrics = evaluate_predictions([0, 0, 1, 1, 2], [0, 0, 1, 1, 1], [9, 9, 9])
    assert metrics.macro_f1 == pytest.approx((1 + 0.8) / 2)
    assert metrics.f1_per_class[2] is None


def test_parts_of_predictions_join_and_are_taken_apart():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(20, 4)), rng.integers(0, 4, 20)
    whole = Predictions.of(logits, labels)
    joined = Predictions.joined([Predictions.of(logits[:7], labels[:7]), Predictions.of(logits[7:], labels[7:])])
    for name in ("classes", "confidence", "nll", "brier"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
        np.testing.assert_array_equal(getattr(whole.take(np.array([3, 1])), name), getattr(whole, name)[[3, 1]])


def test_empty_groups_and_absent_classes_are_none():
    metrics = evaluate_predictions(np.array([0, 0, 1]), np.array([0, 0, 0]), np.array([500, 400, 300]))
    assert (metrics.medium, metrics.few) == (None, None)
    assert metrics.per_class == [pytest.approx(2 / 3), None, None]
    assert metrics.many == pytest.approx(2 / 3)
    assert shot_accuracy(np.array([np.nan, 0.5]), np.array([500, 5])) == {"many": None, "medium": None, "few": 0.5}


@pytest.mark.parametrize(
    ("logits", "labels", "counts", "message"),
    [
        (np.zeros((3, 2)), np.zeros(4, int), np.ones(2), "do not fit together"),
        (np.zeros((3, 2)), np.zeros(3, int), np.ones(3), "do not fit together"),
        (np.array([[0.0, 1], [np.nan, 0]]), np.zeros(2, int), np.ones(2), "sample 1 are not finite"),
        (np.zeros((0, 2)), np.zeros(0, int), np.ones(2), "no labelled samples"),
        (np.zeros((2, 2)), np.array([0, 2]), np.ones(2), r"label lies outside 0\.\.1"),
        (np.zeros((2, 2)), np.array([[0], [1]]), np.ones(2), r"labels must be whole class numbers, shape \(N,\)"),
        (np.zeros((2, 2)), np.array([0.5, 1]), np.ones(2), "labels must be whole class numbers"),
        (np.zeros((2, 2)), np.array(["a", "b"]), np.ones(2), "labels must be whole class numbers"),
    ],
)
def test_bad_input_is_named(logits, labels, counts, message):
    with pytest.raises(UserError, match=message):
        evaluate(logits, labels, counts)


def test_one_prediction_per_label():
    with pytest.raises(UserError, match="1 predictions for 3 labels"):
        evaluate_predictions([0], [0, 1, 1], [5, 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_lists_and_arrays_score_alike(dtype):
    logits = torch.randn(30, 3, dtype=dtype, requires_grad=True)
    labels = torch.arange(30) % 3
    expected = evaluate(logits.detach().double().numpy(), labels.numpy(), np.array([9, 5, 2]))
    assert evaluate(logits, labels, [9, 5, 2]).confusion == expected.confusion
    predicted = logits.argmax(1)
    assert evaluate_predictions(predicted.float(), labels.tolist(), torch.tensor([9, 5, 2])).top1 == expected.top1


def test_many_classes_are_written_as_the_cells_that_are_not_empty():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(3000, 1200)), rng.integers(0, 1200, 3000)
    metrics = evaluate(logits, labels, np.full(1200, 5))
    written = metrics.to_dict()
    assert "confusion" not in written
    cells = {(truth, taken_for): samples for truth, taken_for, samples in written["confusion_cells"]}
    by_hand = sklearn_confusion(labels, logits.argmax(1), labels=range(1200))
    assert sum(cells.values()) == 3000
    assert all(by_hand[place] == samples for place, samples in cells.items())
    np.testing.assert_array_equal(metrics.matrix(), by_hand)
    assert metrics.ece == pytest.approx(expected_calibration_error(softmax(logits), labels))


def test_an_extreme_logit_does_not_overflow():
    """The largest logit is subtracted before the exponential: exp(800) is no number."""
    metrics = evaluate(np.array([[800.0, 0.0], [0.0, 900.0]]), [0, 0], [5, 5])
    assert metrics.nll == pytest.approx(450)
    assert metrics.brier == pytest.approx(1)
    assert metrics.ece == pytest.approx(0.5)


def test_confidence_on_the_edge_of_a_bin_belongs_below():
    """Bins are open below and closed above: of two bins 0.5 is in the first, and so is 0."""
    share, confidence, accuracy = binned(np.array([0.0, 0.5, 0.500001, 1.0]), np.array([1, 0, 1, 1]), bins=2)
    assert share.tolist() == [0.5, 0.5]
    np.testing.assert_allclose(confidence, [0.25, 0.75], atol=1e-6)
    assert accuracy.tolist() == [0.5, 1]
    assert len(binned(np.array([0.3]), np.array([1]))[0]) == 15  # Guo et al.
    assert binned(np.array([1 + 1e-12]), np.array([1]), bins=2)[0].tolist() == [0, 1]  # one, but for rounding


def test_at_the_training_prior_classes_count_as_often_as_they_were_trained():
    labels, predictions = [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]
    assert evaluate_predictions(predictions, labels, [90, 10]).natural == pytest.approx(0.9 * 1 + 0.1 * 0.25)
    assert evaluate_predictions(predictions, labels, [90, 10, 40]).natural == pytest.approx(0.9 * 1 + 0.1 * 0.25)
    assert evaluate_predictions(predictions, labels, [0, 0]).natural == pytest.approx((1 + 0.25) / 2)


def test_rows_are_numbered_across_chunks():
    logits = np.zeros((2100, 3))
    logits[2050, 1] = np.inf
    with pytest.raises(UserError, match="logits of sample 2050 are not finite"):
        evaluate(logits, np.zeros(2100, int), [5, 3, 1])
    with pytest.raises(UserError, match=r"a prediction lies outside 0\.\.1: 0 to 2"):
        evaluate_predictions([0, 2], [0, 1], [5, 3])
    with pytest.raises(UserError, match=r"a label lies outside 0\.\.1: -1 to 1"):
        evaluate_predictions([0, 1], [-1, 1], [5, 3])


def test_scores_of_two_classes_are_those_of_scikit_learn():
    """Also of logits so large that the confidence is 1 for nearly all samples, and of ties."""
    rng = np.random.default_rng(0)
    y = (np.arange(500) % 10 == 0).astype(int)
    for size in (1.0, 60.0):
        margin = size * (rng.normal(size=500) + y - 1).round(2)
        scores = evaluate(np.stack([0 * margin, margin], 1), y, np.bincount(y))
        assert scores.roc_auc == pytest.approx(roc_auc_score(y, margin))
        assert scores.average_precision == pytest.approx(average_precision_score(y, margin))
        assert scores.precision == pytest.approx(precision_score(y, margin > 0))
        assert scores.flagged == pytest.approx((margin > 0).mean())
        assert {"roc_auc", "flagged"} <= scores.to_dict().keys()
        # The rare class is the positive one, whatever its number.
        mirrored = evaluate(np.stack([margin, 0 * margin], 1), 1 - y, np.bincount(1 - y))
        assert mirrored.average_precision == pytest.approx(scores.average_precision)
        assert mirrored.precision == pytest.approx(precision_score(y, margin >= 0))  # a tie is class 0
        assert mirrored.flagged == pytest.approx((margin >= 0).mean())
    three = evaluate(np.eye(3)[y], y, np.array([5, 5, 5]))
    assert three.roc_auc is None
    assert "roc_auc" not in three.to_dict()


def test_average_precision_is_the_mean_precision_at_each_positive():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(60, 4)), rng.random((60, 4)) < [0.5, 0.2, 0.05, 0.0]
    labels[7, 2] = True
    found = average_precision(torch.tensor(scores), labels)
    for column in range(3):
        ranked = labels[np.argsort(-scores[:, column]), column]
        precision = np.cumsum(ranked) / np.arange(1, 61)
        assert found[column] == pytest.approx(precision[ranked].mean())
    assert np.isnan(found[3])  # no positive
    np.testing.assert_array_equal(average_precision(3 * scores - 8, labels.astype(int)), found)
    with pytest.raises(UserError, match=r"scores have shape \(60, 3\), but labels \(60, 4\)"):
        average_precision(scores[:, :3], labels)
    with pytest.raises(UserError, match="scores of row 5 are not finite"):
        average_precision(np.where(np.arange(60)[:, None] == 5, np.nan, scores), labels)
