"""The numbers of a report, against plain formulas."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import balanced_accuracy_score, f1_score

from longtail import MARC, Outputs
from longtail.metrics.scores import evaluate
from longtail.report.summary import Calibrated, grouped_confusion, summarise, verdict

from .conftest import summary_of


def test_states_are_those_of_plain_formulas(real_outputs, real_summary):
    train, _, test = real_outputs
    marc = MARC().fit(train)
    repaired = marc.omega_ * test.logits + marc.beta_ * np.linalg.norm(test.head_weight, axis=1)
    for state, logits in ((real_summary.before, test.logits), (real_summary.after, repaired)):
        predicted = logits.argmax(1)
        assert state.metrics.balanced == pytest.approx(balanced_accuracy_score(test.labels, predicted))
        assert state.metrics.macro_f1 == pytest.approx(f1_score(test.labels, predicted, average="macro"))
        for j in range(10):
            own = logits[test.labels == j][:, j]
            assert state.means.logits[j] == pytest.approx(own.mean(), rel=1e-4)
            norm = np.linalg.norm(test.head_weight[j])
            assert state.means.margins[j] == pytest.approx(own.mean() / norm, rel=1e-4)
        expected = spearmanr(state.means.margins, test.class_counts).statistic
        assert state.correlation["margins"] == pytest.approx(expected)


def test_the_papers_observation_on_held_out_images(real_summary):
    """Mean margins and logits fall from head to tail before, and are flatter after."""
    before, after = real_summary.before, real_summary.after
    for name in ("logits", "margins"):
        assert before.correlation[name] > 0.7
        assert after.correlation[name] < before.correlation[name]
        assert np.ptp(getattr(after.means, name)) < np.ptp(getattr(before.means, name))


def test_strengths_lead_from_the_unchanged_model_to_the_calibration(real_outputs, real_summary):
    train, validation, test = real_outputs
    marc = MARC().fit(train)
    assert [real_summary.points[0].metrics, real_summary.points[-1].metrics] == [
        pytest.approx(state.metrics) for state in (real_summary.before, real_summary.after)
    ]
    for outputs, name in ((test, "metrics"), (validation, "validation")):
        mixed = 0.6 * outputs.logits + 0.4 * marc.transform(outputs)
        found = getattr(real_summary.points[8], name)
        assert found.balanced == pytest.approx(evaluate(mixed, outputs.labels, test.class_counts).balanced, abs=1e-3)


def states(accuracy_before, accuracy_after, counts, each=100, costs=None):
    """A summary whose classes have these accuracies; errors go to the next class."""
    labels = np.repeat(np.arange(len(counts)), each)

    def logits(accuracy):
        right = np.concatenate([np.arange(each) < round(each * share) for share in accuracy])
        return 4.0 * np.eye(len(counts))[np.where(right, labels, (labels + 1) % len(counts))].astype(np.float32)

    held_out = Outputs(labels, np.array(counts), logits=logits(accuracy_before), split="test", class_names=NAMES)
    return summarise(held_out, None, [Calibrated("cRT", logits(accuracy_after), costs=costs)])


NAMES = ("copepod", "diatom", "worm", "jelly", "salp", "krill")
COUNTS = [5000, 900, 200, 90, 15, 9]
BEFORE = [0.9, 0.8, 0.7, 0.5, 0.1, 0.0]


@pytest.mark.parametrize(
    ("after", "sentences"),
    [
        (
            [0.8, 0.75, 0.7, 0.6, 0.6, 0.5],
            "cRT: few-shot classes +50.0, balanced accuracy +15.8 points; costs 8.4 points of top-1 at the training "
            "prior; class “copepod” 90 → 80 %. Use it if all classes matter equally.",
        ),
        (
            [0.1, 0.75, 0.7, 0.7, 0.9, 0.9],
            "cRT: few-shot classes +85.0, balanced accuracy +17.5 points; costs 64.5 points of top-1 at the training "
            "prior; class “copepod” 90 → 10 %. Use it only if class “copepod” may be lost; otherwise limit the price "
            "below.",
        ),
        (
            [0.91, 0.8, 0.7, 0.6, 0.4, 0.2],
            "cRT: few-shot classes +25.0, balanced accuracy +10.2 points; costs no top-1. Use it.",
        ),
        (
            [0.9, 0.8, 0.71, 0.5, 0.1, 0.0],
            "No clear gain with cRT on 600 test images: balanced accuracy +0.2 [-0.2, +0.5] "
            "points; costs no top-1. Keep the model unchanged, or measure on about 2,400 images.",
        ),
        (
            [0.5, 0.4, 0.7, 0.5, 0.1, 0.1],
            "cRT makes the model worse: few-shot classes +5.0, balanced accuracy -11.7 points; costs 38.0 points of "
            "top-1 at the training prior; class “copepod” 90 → 50 %. Keep the model unchanged.",
        ),
        (BEFORE, "cRT changes no prediction on 600 test images: nothing gets better, and nothing worse."),
    ],
)
def test_the_verdict_fits_the_numbers(after, sentences):
    assert verdict(states(BEFORE, after, COUNTS)) == sentences


@pytest.mark.parametrize(
    ("of_tail", "of_head", "sentences"),
    [
        (30.0, 1.0, "cRT: cost per image 0.235 → 0.192, few-shot classes +50.0"),
        (1.0, 1.0, "No clear saving: keep the model unchanged."),
    ],
)
def test_the_verdict_opens_with_the_cost_if_it_is_known(of_tail, of_head, sentences):
    costs = np.where(np.eye(6), 0.0, np.array([of_head] * 4 + [of_tail] * 2)[:, None])
    summary = states(BEFORE, [0.88, 0.8, 0.7, 0.6, 0.6, 0.5], COUNTS, costs=costs)
    own = [
        (1 - np.array(accuracy)) @ (costs.max(1) * COUNTS) / sum(COUNTS)
        for accuracy in (BEFORE, [0.88, 0.8, 0.7, 0.6, 0.6, 0.5])
    ]
    assert summary.cost[0] == pytest.approx(own[1])
    assert summary.cost[1].value == pytest.approx(own[1] - own[0])
    assert sentences in verdict(summary)
    assert [summary.points[place].cost for place in (0, -1)] == pytest.approx(own)


def test_an_imbalanced_split_is_known(real_summary):
    assert not real_summary.imbalanced
    labels = np.repeat([0, 1], [9, 3])
    outputs = Outputs(labels, np.array([90, 30]), logits=4 * np.eye(2)[labels], split="test")
    summary = summarise(outputs, None, [Calibrated("MARC", outputs.logits)])
    assert (summary.imbalanced, summary.sizes, summary.tail) == (True, (9, 3), None)


def test_changes_are_differences_with_bounds_around_them(real_outputs, real_summary):
    _, _, test = real_outputs
    before, after = real_summary.before, real_summary.after
    changes = real_summary.changes
    for j in range(10):
        own = test.labels == j
        expected = (after.predictions == j)[own].mean() - (before.predictions == j)[own].mean()
        assert changes.value[j] == pytest.approx(expected)
        assert changes.low[j] <= changes.value[j] <= changes.high[j]
    assert changes.low[9] > 0.2  # the smallest class gains much
    assert changes.high[0] < 0  # the largest pays


def test_classes_that_are_not_in_the_split_have_no_change():
    rng = np.random.default_rng(0)
    every = np.repeat([0, 1, 2], [9, 5, 1])
    train = Outputs(every, np.array([9, 5, 1]), logits=4.0 * np.eye(3)[every] + rng.normal(size=(15, 3)))
    test = Outputs(np.array([0, 0, 2, 2]), train.class_counts, logits=4.0 * np.eye(3)[[0, 1, 2, 0]], split="test")
    changes = summary_of(train, test).changes
    assert np.isnan(changes.value).tolist() == [False, True, False]


def test_worst_confusions_are_the_largest_cells(real_summary):
    confusion = np.array(real_summary.before.metrics.confusion, dtype=float)
    shares = confusion / confusion.sum(1, keepdims=True)
    np.fill_diagonal(shares, 0)
    first = real_summary.confusions[0]
    assert first.before == pytest.approx(shares.max())
    assert (first.truth, first.predicted) == np.unravel_index(shares.argmax(), shares.shape)
    values = [confusion.before for confusion in real_summary.confusions]
    assert values == sorted(values, reverse=True)


def test_new_confusions_are_the_cells_that_grow_most(real_summary):
    matrices = [np.array(state.metrics.confusion, dtype=float) for state in (real_summary.before, real_summary.after)]
    before, after = (matrix / matrix.sum(1, keepdims=True) for matrix in matrices)
    growth = {(i, j): after[i, j] - before[i, j] for i in range(10) for j in range(10) if i != j}
    largest = sorted(growth, key=growth.get, reverse=True)[:3]
    assert [(pair.truth, pair.predicted) for pair in real_summary.new_confusions[:3]] == largest
    for pair in (*real_summary.confusions, *real_summary.new_confusions):
        known = (pair.before, pair.after, pair.accuracy_before, pair.accuracy_after)
        i, j = pair.truth, pair.predicted
        assert known == pytest.approx((before[i, j], after[i, j], before[i, i], after[i, i]))
    assert all(pair.after > pair.before for pair in real_summary.new_confusions)


def test_many_classes_are_put_together_in_the_confusion_matrix():
    rng = np.random.default_rng(0)
    labels = np.arange(2400) % 120
    logits = rng.normal(size=(2400, 120)) + 2 * np.eye(120)[labels]
    metrics = evaluate(logits, labels, np.arange(120, 0, -1))
    shares, groups = grouped_confusion(metrics, np.arange(120), most=50)
    assert shares.shape == (50, 50)
    assert shares.sum(1) == pytest.approx(1)
    assert sum(group.stop - group.start for group in groups) == 120
    whole, _ = grouped_confusion(metrics, np.arange(120), most=500)
    confusion = np.array(metrics.confusion)
    np.testing.assert_allclose(whole, confusion / confusion.sum(1, keepdims=True))
