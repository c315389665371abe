"""CalibratedLongTail: scikit-learn's classifiers on long-tailed digits, and scikit-learn's own checks."""

import pickle

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import recall_score
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.naive_bayes import GaussianNB, MultinomialNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import check_estimator

import longtail
from longtail.errors import UserError
from longtail.posthoc.gate import FitWarning
from longtail.sklearn import CalibratedLongTail

LOGISTIC = LogisticRegression(C=0.1, max_iter=1000)


@pytest.fixture(scope="module")
def digits():
    """Digits with 120 images of the 0 down to 6 of the 9, and all others to test on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order] / 16, labels[order]
    counts = np.geomspace(120, 6, 10).round().astype(int)
    rows = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in enumerate(counts)])
    others = np.setdiff1d(np.arange(len(labels)), rows)
    return (images[rows], labels[rows]), (images[others], labels[others])


def accuracies(model, test):
    """Mean accuracy of all classes, and of the last three."""
    recall = recall_score(test[1], model.predict(test[0]), average=None)
    return recall.mean(), recall[7:].mean()


@pytest.mark.parametrize(
    "model",
    [
        CalibratedLongTail(),
        CalibratedLongTail(LinearSVC(), longtail.posthoc.LogitAdjustment()),
        CalibratedLongTail(DecisionTreeClassifier(max_depth=3, random_state=0), longtail.posthoc.PlattScaling()),
        CalibratedLongTail(method=longtail.posthoc.TauNorm(), cv=2),
        CalibratedLongTail(method=longtail.posthoc.LWS(), cv=2),
        CalibratedLongTail(method=longtail.posthoc.VectorScaling(), cv=2),
        CalibratedLongTail(method=longtail.posthoc.TemperatureScaling(), cv=2),
    ],
    ids=lambda model: type(model.method).__name__,
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # classes told apart perfectly
def test_checks_of_scikit_learn(model):
    check_estimator(model, on_skip=None)  # raises for any that fails: no exception is declared


@pytest.mark.parametrize(
    ("estimator", "gain"),
    [
        (LOGISTIC, 0.4),
        (LinearSVC(random_state=0), 0.1),
        (HistGradientBoostingClassifier(max_iter=15, max_leaf_nodes=8, min_samples_leaf=3, random_state=0), 0.1),
        (make_pipeline(StandardScaler(), GaussianNB(var_smoothing=0.1)), 0.05),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_tail_rises(estimator, gain, digits):
    train, test = digits
    overall, tail = accuracies(clone(estimator).fit(*train), test)
    model = CalibratedLongTail(estimator).fit(*train)
    repaired_overall, repaired_tail = accuracies(model, test)
    assert repaired_tail > tail + gain
    assert repaired_overall > overall
    assert model.predict_proba(test[0]).sum(1) == pytest.approx(1)
    assert model.decision_function(test[0]).shape == (len(test[0]), 10)


def test_cross_validated_scores_beat_those_of_training(digits):
    train, test = digits
    honest = CalibratedLongTail(DecisionTreeClassifier(random_state=0)).fit(*train)
    fitted = DecisionTreeClassifier(random_state=0).fit(*train)
    with pytest.warns(FitWarning, match=r"classifies all \d+ samples correctly: if it was trained on them"):
        fooled = CalibratedLongTail(fitted, cv="prefit").fit(*train)
    logits = fooled._logits(train[0])
    assert (fooled.classes_[logits.argmax(1)] == train[1]).all()  # a tree knows its own samples by heart
    assert accuracies(honest, test)[1] >= accuracies(fooled, test)[1]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_fitted_estimator_is_repaired_on_held_out_data(frozen, digits):
    train, (images, labels) = digits
    fitted = clone(LOGISTIC).fit(*train)
    weights = fitted.coef_.copy()
    wrapped = CalibratedLongTail(FrozenEstimator(fitted)) if frozen else CalibratedLongTail(fitted, cv="prefit")
    model = wrapped.fit(images[::2], labels[::2])
    test = images[1::2], labels[1::2]
    assert accuracies(model, test)[1] > accuracies(fitted, test)[1] + 0.3
    np.testing.assert_array_equal(fitted.coef_, weights)


def test_a_prior_of_training_can_be_given(digits):
    train, (images, labels) = digits
    counts = np.bincount(train[1])
    fitted = clone(LOGISTIC).fit(*train)
    model = CalibratedLongTail(fitted, longtail.posthoc.LogitAdjustment(), cv="prefit").fit(
        images, labels, class_counts=counts
    )
    np.testing.assert_allclose(model.method_.shift_, -np.log(counts / counts.sum()))


def test_linear_models_show_their_class_vectors(digits):
    train, _ = digits
    model = CalibratedLongTail(make_pipeline(StandardScaler(), LOGISTIC), longtail.MARC()).fit(*train)
    norms = np.linalg.norm(model.estimator_[-1].coef_, axis=1)
    np.testing.assert_allclose(model.method_.weight_norms_, norms)


def test_grid_search_clone_and_pickle(digits):
    train, test = digits
    model = CalibratedLongTail(LOGISTIC, longtail.MARC(), cv=3)
    grid = {"method__gamma": [0.0, 1.2], "estimator__C": [0.1]}
    search = GridSearchCV(model, grid, scoring="balanced_accuracy", cv=2).fit(*train)
    assert search.best_params_["method__gamma"] == 1.2
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict(test[0]), search.predict(test[0]))
    with pytest.raises(NotFittedError):
        clone(again).predict(test[0])


@pytest.mark.parametrize(
    "model",
    [
        CalibratedLongTail(LOGISTIC, longtail.HALO()),
        CalibratedLongTail(LOGISTIC, longtail.posthoc.Tempered(longtail.MARC("auto"))),
        CalibratedLongTail(longtail.Probe(), longtail.HALO(), cv=2),
    ],
    ids=["HALO", "Tempered", "Probe"],
)
def test_methods_for_held_out_samples_take_cross_validated_scores(model, digits):
    """And those of a fitted estimator on held-out data."""
    (images, labels), test = digits
    before = accuracies(clone(LOGISTIC).fit(images, labels), test)[1]
    assert accuracies(clone(model).fit(images, labels), test)[1] > before + 0.1
    if isinstance(model.estimator, LogisticRegression):
        fitted = clone(LOGISTIC).fit(images[::2], labels[::2])
        held_out = clone(model).set_params(estimator=fitted, cv="prefit").fit(images[1::2], labels[1::2])
        assert accuracies(held_out, test)[0] > accuracies(fitted, test)[0]


def test_settings_of_the_default_parts_and_containers():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [180, 20])
    features = rng.normal(size=(200, 3)) + y[:, None]
    grid = {"method__gamma": [0.0, 1.2], "estimator__C": [1.0]}
    search = GridSearchCV(CalibratedLongTail(), grid, scoring="balanced_accuracy", cv=2).fit(features, y)
    assert search.best_params_ == {"estimator__C": 1.0, "method__gamma": 1.2}
    model = CalibratedLongTail(make_pipeline(StandardScaler(), LOGISTIC), cv=2)
    expected = clone(model).fit(features, y).predict_proba(features)
    model.set_output(transform="pandas").fit(features, y).set_output(transform="pandas")
    assert isinstance(model.estimator_[0].transform(features), pd.DataFrame)
    assert isinstance(model.method_.transform(3 * np.eye(2)), pd.DataFrame)
    np.testing.assert_array_equal(model.predict_proba(features), expected)


@pytest.mark.parametrize(
    "names",
    [np.array([f"digit {n}" for n in range(10)]), np.arange(10) * 7 - 20, pd.Index(list("abcdefghij"))],
    ids=str,
)
def test_labels_of_any_type(names, digits):
    (images, labels), (new, truth) = digits
    names = np.asarray(names)
    model = CalibratedLongTail(LOGISTIC).fit(pd.DataFrame(images).rename(columns=str), names[labels])
    assert model.classes_.tolist() == names.tolist()
    assert model.score(pd.DataFrame(new).rename(columns=str), names[truth]) > 0.85


class NumbersOnly(LogisticRegression):
    """Takes classes 0, 1, 2, … and no other, as XGBoost does."""

    def fit(self, X, y, sample_weight=None):  # noqa: N803
        if not np.array_equal(np.unique(y), np.arange(len(np.unique(y)))):
            raise ValueError(f"Invalid classes inferred from unique values of y: {np.unique(y)}")
        return super().fit(X, y, sample_weight)


def boosted_trees():
    return pytest.importorskip("xgboost", reason="xgboost is not installed").XGBClassifier(n_estimators=10)


@pytest.mark.parametrize("build", [lambda: NumbersOnly(max_iter=1000), boosted_trees], ids=["numbers only", "xgboost"])
def test_names_for_estimators_that_take_numbers_only(build, digits):
    (images, labels), (new, truth) = digits
    names = np.array([f"digit {9 - n}" for n in range(10)])
    model = CalibratedLongTail(build(), cv=2).fit(images, names[labels])
    assert sorted(model.classes_) == sorted(names)
    numbers = CalibratedLongTail(build(), cv=2).fit(images, 9 - labels)
    assert (model.predict(new) == names[9 - numbers.predict(new)]).all()
    assert model.score(new, names[truth]) > 0.6


def test_what_is_wrong_is_said_in_the_words_of_the_first_try(digits):
    (images, labels), _ = digits
    with pytest.raises(ValueError, match="Invalid classes inferred"):
        CalibratedLongTail(NumbersOnly(C=-1.0)).fit(images, labels.astype(str))


class Counted(GaussianNB):
    """Notes in a file how many samples each fit was given; more processes than one may write."""

    def __init__(self, notes=None, var_smoothing=0.1):
        super().__init__(var_smoothing=var_smoothing)
        self.notes = notes

    def fit(self, X, y):  # noqa: N803
        with open(self.notes, "a") as file:
            file.write(f"{len(y)}\n")
        return super().fit(X, y)


@pytest.fixture
def counted(tmp_path):
    """An estimator, and `fits()`: samples of each fit since it was asked last."""
    notes = tmp_path / "fits"

    def fits():
        sizes = [int(line) for line in notes.read_text().split()] if notes.exists() else []
        notes.unlink(missing_ok=True)
        return sizes

    return Counted(str(notes)), fits


@pytest.mark.parametrize(("cv", "folds"), [(None, 5), (2, 2), (StratifiedKFold(3), 3)])
def test_what_it_costs_is_one_fit_more_than_there_are_folds(cv, folds, counted, digits):
    estimator, fits = counted
    (images, labels), _ = digits
    CalibratedLongTail(estimator, cv=cv).fit(images, labels)
    first, *others = fits()
    assert first == len(labels)
    assert len(others) == folds
    assert sum(others) == (folds - 1) * len(labels)


def test_a_fitted_estimator_is_never_fitted_again(counted, digits):
    estimator, fits = counted
    (images, labels), (new, truth) = digits
    estimator.fit(images, labels)
    assert fits() == [len(labels)]
    CalibratedLongTail(estimator, cv="prefit").fit(new, truth).predict(new)
    CalibratedLongTail(FrozenEstimator(estimator)).fit(new, truth).predict(new)
    assert fits() == []


def test_fitted_folds_serve_other_methods(counted, digits, tmp_path):
    """A search over settings of the method fits the estimator once per part of the data, not once per setting."""
    estimator, fits = counted
    train, (new, _) = digits
    options = {"cv": 2, "memory": str(tmp_path / "kept")}
    grid = {"method__gamma": [0.0, 0.6, 1.2]}
    found = GridSearchCV(CalibratedLongTail(estimator, longtail.MARC(), **options), grid, cv=2).fit(*train)
    assert len(fits()) == 3 * 3  # two parts and all of the data, each fitted whole and in two folds
    plain = GridSearchCV(CalibratedLongTail(estimator, longtail.MARC(), cv=2), grid, cv=2).fit(*train)
    assert len(fits()) == 3 * (2 * 3 + 1)
    np.testing.assert_array_equal(found.predict_proba(new), plain.predict_proba(new))
    CalibratedLongTail(estimator.set_params(var_smoothing=0.2), **options).fit(*train)  # another estimator
    CalibratedLongTail(estimator, **options).fit(train[0], train[1][::-1])  # other labels
    assert len(fits()) == 6


def test_two_classes(digits):
    (images, labels), (new, truth) = digits
    two, few = labels % 9 == 0, truth % 9 == 0  # zeros and nines
    model = CalibratedLongTail(LinearSVC()).fit(images[two], labels[two] == 9)
    lead, shares = model.decision_function(new[few]), model.predict_proba(new[few])
    assert lead.shape == (few.sum(),)
    assert ((lead > 0) == model.predict(new[few])).all()
    assert ((shares[:, 1] > 0.5) == model.predict(new[few])).all()
    assert (model.predict(new[few]) == (truth[few] == 9)).mean() > 0.95


def test_texts_and_sparse_matrices(digits):
    texts = ["cheap pills now"] * 9 + ["buy cheap pills"] * 6 + ["meeting at noon"] * 3 + ["lunch meeting"] * 2
    kinds = ["spam"] * 15 + ["work"] * 5
    model = CalibratedLongTail(make_pipeline(CountVectorizer(), MultinomialNB())).fit(texts, kinds)
    assert model.predict(["pills", "noon meeting"]).tolist() == ["spam", "work"]
    train, test = digits
    sparse = CalibratedLongTail(LOGISTIC).fit(csr_matrix(train[0]), train[1])
    dense = CalibratedLongTail(LOGISTIC).fit(*train)
    assert (sparse.predict(csr_matrix(test[0])) == dense.predict(test[0])).mean() > 0.99


def test_weights_of_samples_reach_the_estimator(digits):
    (images, labels), _ = digits
    weights = np.where(labels < 5, 1.0, 4.0)
    model = CalibratedLongTail(LOGISTIC).fit(images, labels, sample_weight=weights)
    alone = clone(LOGISTIC).fit(images, labels, sample_weight=weights)
    np.testing.assert_allclose(model.estimator_.coef_, alone.coef_)


@pytest.mark.parametrize(
    ("model", "rows", "message"),
    [
        (CalibratedLongTail(LOGISTIC), slice(0, -5), 'class 9 has 1 sample; .* cv="prefit"'),
        (CalibratedLongTail(LOGISTIC), slice(0, 50), "class"),
        (CalibratedLongTail(LOGISTIC, cv="prefit"), slice(None), "needs an estimator that is fitted already"),
        (CalibratedLongTail(LOGISTIC, cv="fitted"), slice(None), "cv must be .* not 'fitted'"),
        (CalibratedLongTail(LOGISTIC, cv=KFold(10)), slice(None), "leaves a class out .* stratify"),
        (CalibratedLongTail(LinearRegression()), slice(None), "neither decision_function nor predict_proba"),
        (CalibratedLongTail(SVC(decision_function_shape="ovo")), slice(None), 'one per pair; .*"ovr"'),
        (CalibratedLongTail(LOGISTIC, longtail.posthoc.CRT()), slice(None), "CRT needs the features"),
        (CalibratedLongTail(LOGISTIC, longtail.Probe()), slice(None), "not Probe; a classifier .* as the estimator"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_fit_is_named(model, rows, message, digits):
    (images, labels), _ = digits
    with pytest.raises(ValueError, match=message):
        model.fit(images[rows], labels[rows])


def test_a_class_the_estimator_does_not_know(digits):
    (images, labels), _ = digits
    fitted = clone(LOGISTIC).fit(images[labels < 9], labels[labels < 9])
    with pytest.raises(UserError, match="class .*9.* is not known"):
        CalibratedLongTail(fitted, cv="prefit").fit(images, labels)


def test_a_target_prior_moves_the_threshold_and_not_the_order():
    """HALO refuses seen samples; cross-validated scores are not."""
    table, benign = load_breast_cancer(return_X_y=True)
    rows = np.concatenate([np.flatnonzero(benign == 1), np.flatnonzero(benign == 0)[:20]])
    margins = {}
    for prior in ("train", "uniform"):
        model = CalibratedLongTail(
            make_pipeline(StandardScaler(), LogisticRegression()), longtail.HALO(target_prior=prior)
        )
        margins[prior] = model.fit(table[rows], benign[rows]).decision_function(table)
    np.testing.assert_allclose(margins["train"] - margins["uniform"], np.log(357 / 20), rtol=1e-5)
