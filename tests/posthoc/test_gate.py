"""The gate: each trap is refused or warned of, each look-alike passes."""

import warnings

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from longtail import HALO, MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc import CRT, DisAlign, LogitAdjustment, MatrixScaling, VectorScaling
from longtail.posthoc.gate import FitWarning, check_fit_inputs, rank_agreement
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.result_check import check_fit_result
from longtail.sklearn import CalibratedLongTail


def samples(counts=(600, 200, 100, 50), strength=4.0, seed=0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(counts)), counts)
    order = rng.permutation(len(y))
    logits = rng.normal(size=(len(y), len(counts))) + strength * np.eye(len(counts))[y] + np.log(counts)
    return logits[order], y[order]


def passes(logits, y, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FitWarning)
        check_fit_inputs(from_arrays(logits, y, need_every_class=False, **more))


def test_the_variance_of_the_statistic_is_that_of_permutations():
    logits, y = samples((30, 12, 6), strength=1.0)
    logits = logits - logits.mean(1, keepdims=True)
    found, deviation, _ = rank_agreement(logits, y)
    ranks = np.argsort(np.argsort(logits, axis=0), axis=0) / len(y) - (len(y) - 1) / (2 * len(y))
    rng = np.random.default_rng(1)
    drawn = [ranks[np.arange(len(y)), rng.permutation(y)].sum() for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(0, abs=4 * deviation / 60)
    assert np.std(drawn) == pytest.approx(deviation, rel=0.05)
    assert found == pytest.approx(sum(ranks[i, label] for i, label in enumerate(y)))


def test_good_samples_pass_in_silence():
    passes(*samples())


@pytest.mark.parametrize("method", [MARC(), LogitAdjustment(), VectorScaling()], ids=lambda m: type(m).__name__)
def test_shuffled_labels_are_refused(method):
    logits, y = samples((3000, 1000, 500, 250))
    with pytest.raises(UserError, match=r"no more than by chance .* different order of samples"):
        method.fit(logits, np.random.default_rng(5).permutation(y))


@pytest.mark.parametrize("size", [300, 1000, 5000])
@pytest.mark.parametrize("classes", [2, 10])
def test_shuffled_labels_are_never_silent(size, classes):
    """One permutation in a hundred agrees by chance; these do not."""
    logits, y = samples((size // classes,) * classes)
    with pytest.raises((UserError, FitWarning), match="than by chance"):
        passes(logits, np.random.default_rng(2).permutation(y))


def test_a_held_out_set_with_reversed_counts_passes():
    """Its model knows the training counts: most errors go to the classes that are large there."""
    counts = np.array([600, 200, 100, 50])
    logits, y = samples(counts[::-1], strength=2.0)
    passes(2 * (logits - np.log(counts[::-1])) + np.log(counts), y, class_counts=counts)


def test_labels_in_another_order_of_classes_are_refused():
    logits, y = samples((200, 200, 200, 200))
    with pytest.raises(UserError, match="different order of classes"):
        MARC().fit(logits[:, [1, 2, 3, 0]], y)


def test_two_columns_in_another_order_are_warned_of():
    logits, y = samples((200, 200, 200, 200))
    with pytest.warns(FitWarning, match="different order of classes"):
        check_fit_inputs(from_arrays(logits[:, [0, 1, 3, 2]], y))


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_collapsed_model_is_refused(noise):
    _, y = samples()
    logits = np.tile([3.0, 1.0, -1.0, 0.5], (len(y), 1)) * (
        1 + noise * np.random.default_rng(0).normal(size=(len(y), 4))
    )
    for method in (MARC(), HALO()):
        with pytest.raises(UserError, match="the model has collapsed"):
            method.fit(logits, y, validation=(logits[:50], y[:50]))
    same = Outputs(y, np.bincount(y), logits=logits.astype(np.float32))
    with pytest.raises(UserError, match="the model has collapsed"):
        MARC().fit(same)


def test_a_new_head_needs_features_that_vary_not_logits():
    logits, y = samples()
    CRT().fit(0 * logits, y, features=logits)
    with pytest.raises(UserError, match="the model has collapsed"):
        CRT().fit(0 * logits, y, features=np.ones((len(y), 3)))


@pytest.mark.parametrize(("factor", "name"), [(1, "probabilities"), (100, "percentages")])
@pytest.mark.parametrize("broken", [0, 1])
def test_probabilities_are_refused_even_if_a_row_does_not_sum_to_one(factor, name, broken):
    logits, y = samples()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shares[:broken] = 0
    with pytest.raises(UserError, match=f"these are {name}"):
        MARC().fit(factor * shares, y)


def test_sigmoids_are_warned_of():
    logits, y = samples()
    with pytest.warns(FitWarning, match="between 0 and 1"):
        check_fit_inputs(from_arrays(1 / (1 + np.exp(-logits + 4)), y))


def test_logits_times_a_small_number_are_warned_of():
    logits, y = samples()
    with pytest.warns(FitWarning, match="as the last layer gives them"):
        check_fit_inputs(from_arrays(0.001 * (logits - 4), y))
    passes((logits - 4) / np.abs(logits - 4).max(), y)  # cosines


def test_counts_in_another_order_are_warned_of():
    logits, y = samples()
    for counts in ([50, 100, 200, 600], [500, 1000, 2000, 6000]):
        with pytest.warns(FitWarning, match="class_counts are in another order than the labels"):
            check_fit_inputs(from_arrays(logits, y, class_counts=counts))


@pytest.mark.parametrize(
    "sizes", [(600, 200, 100, 50), (60, 20, 10, 5), (50, 50, 50, 50), (30, 30, 25, 12), (3, 2, 2, 1)]
)
def test_sets_that_are_not_the_training_set_pass(sizes):
    """A held-out part, a balanced set, some images of each class, very small ones."""
    passes(*samples(sizes), class_counts=[600, 200, 100, 50])


def test_weak_models_and_noisy_labels_pass():
    rng = np.random.default_rng(0)
    logits, y = samples((20,) * 100, strength=0.3)
    assert 0.01 < (logits.argmax(1) == y).mean() < 0.05
    passes(logits, y)
    logits, y = samples(strength=6.0)
    passes(logits, np.where(rng.random(len(y)) < 0.8, rng.integers(0, 4, len(y)), y))


@pytest.mark.parametrize("seed", range(20))
def test_a_model_at_chance_is_not_refused_if_there_are_few_samples(seed):
    """Eight samples and no information: refusing them would be a guess."""
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        check_fit_inputs(from_arrays(5 * rng.normal(size=(8, 3)), rng.integers(0, 3, 8), need_every_class=False))


@pytest.mark.parametrize("positives", [1, 5, 60])
def test_rare_positives_pass(positives):
    logits, y = samples((60_000, positives), strength=2.0)
    assert not positives < 60 or (logits.argmax(1) == 0).mean() > 0.99
    passes(logits, y)


@pytest.mark.parametrize("positives", [15, 60])
def test_two_classes_that_are_exchanged_are_warned_of_however_rare_one_is(positives):
    """The model is too unsure to be tested for a random order, but no model is worse than chance."""
    logits, y = samples((3000, positives), strength=1.5)
    with pytest.warns(FitWarning, match="less than by chance .* two classes may be exchanged"):
        check_fit_inputs(from_arrays(logits, 1 - y))


def test_cross_validated_scores_pass():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [300, 30])
    features = rng.normal(size=(330, 5)) + 0.5 * y[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FitWarning)
        CalibratedLongTail(LogisticRegression()).fit(features, y)


def test_few_held_out_samples_pass():
    logits, y = samples()
    held, labels = samples((4, 2, 1, 1), seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FitWarning)
        HALO().fit(logits, y, validation=(held, labels))


def test_held_out_samples_of_the_larger_classes_alone_pass():
    """That the others are expected more often is no harm to them."""
    logits, y = samples((2000, 300, 30, 10), strength=2.0)
    held, labels = samples((1000, 200), strength=2.0, seed=3)
    held = np.concatenate([held, np.random.default_rng(0).normal(size=(1200, 2)) + np.log([30, 10])], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FitWarning)
        HALO().fit(logits, y, validation=(held, labels))


def test_more_numbers_than_samples_are_warned_of():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 10)
    logits = 4 * np.eye(20)[labels] + rng.normal(size=(200, 20))
    with pytest.warns(FitWarning, match="MatrixScaling fits 420 numbers on 200 samples, so it learns them by heart"):
        MatrixScaling().fit(logits, labels)


def test_a_fit_that_lowers_the_balanced_accuracy_is_warned_of():
    """Logits that are right for equal classes, fitted to classes as they are."""
    logits, y = samples((3000, 30), strength=2.0)
    with pytest.warns(FitWarning, match="VectorScaling lowers the balanced accuracy"):
        VectorScaling().fit(logits - np.log([3000, 30]), y)


@pytest.mark.filterwarnings("ignore:VectorScaling lowers the (balanced accuracy|AUC)")
@pytest.mark.parametrize(("scale", "message"), [(9.0, "lowers the likelihood"), (-1.0, "reverses the order")])
def test_a_result_that_is_too_sure_or_reversed_is_warned_of(scale, message):
    logits, y = samples((300, 300), strength=1.0)
    method = VectorScaling().fit(logits, y)
    method.scale_, method.shift_ = scale * method.scale_, scale * method.shift_
    with pytest.warns(FitWarning, match=f"VectorScaling {message}"):
        check_fit_result(method, from_arrays(logits, y))


@pytest.mark.parametrize("method", [CRT(), DisAlign(max_iter=500)], ids=["cRT", "DisAlign"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("positives", "warned"), [(10, True), (1500, False)])
def test_what_a_new_head_learns_by_heart_shows_on_samples_left_out_of_its_fit(method, positives, warned, seed):
    """The best linear classifier of two classes in 32 dimensions; ten samples of one of them cannot teach a better."""
    rng = np.random.default_rng(seed)
    y = np.repeat([0, 1], [3000, positives])
    features = rng.normal(size=(len(y), 32)) + 0.25 * y[:, None]
    margin = 0.25 * features.sum(1) - 1 + np.log(positives / 3000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.fit(np.stack([-margin / 2, margin / 2], 1), y, features=features)
    messages = [str(one.message) for one in caught if issubclass(one.category, FitWarning)]
    assert ["s the AUC of the two classes by" in one for one in messages] == [True] * warned
    assert all("samples left out of the fit" in one for one in messages)


def test_a_cross_fit_reduces_large_classes_or_does_not_take_place(monkeypatch):
    """Its work is limited; with too many numbers for that, nothing is fitted again."""
    import longtail.posthoc.result_check as check

    fitted = []
    out_of_fold = check.out_of_fold_logits
    monkeypatch.setattr(check, "out_of_fold_logits", lambda *a: fitted.append(a[1].seen_counts) or out_of_fold(*a))
    logits, y = samples((2000, 500, 60, 1))
    for samples_read in (1000, 250):
        monkeypatch.setattr(check, "MAX_CROSS_FIT", samples_read * 20)
        CRT().fit(logits, y, features=logits)
        monkeypatch.setattr(check, "MAX_CROSS_FIT", samples_read * 8)
        VectorScaling().fit(logits, y)
    np.testing.assert_array_equal(fitted, [[469, 469, 60, 1]])
