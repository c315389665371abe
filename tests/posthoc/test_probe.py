"""Probe on real digits: what it finds, for whom, and the shapes of data it takes."""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from longtail.posthoc.probe.estimator import Probe


@pytest.fixture(scope="module")
def digits():
    """Digits with 120 images of the 0 down to 4 of the 9, and all others to test on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order] / 16, labels[order]
    counts = np.geomspace(120, 4, 10).round().astype(int)
    rows = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in enumerate(counts)])
    others = np.setdiff1d(np.arange(len(labels)), rows)
    return (images[rows], labels[rows]), (images[others], labels[others])


@pytest.fixture(scope="module")
def fitted(digits):
    return Probe().fit(*digits[0])


def test_checks_of_scikit_learn():
    check_estimator(Probe(), on_skip=None)


def test_the_tail_is_recognised_and_confidence_is_honest(digits, fitted):
    (X, y), (test, labels) = digits  # noqa: N806
    plain = LogisticRegression(max_iter=1000).fit(X, y)
    ours = balanced_accuracy_score(labels, fitted.predict(test))
    assert ours > balanced_accuracy_score(labels, plain.predict(test)) + 0.02
    assert log_loss(labels, fitted.predict_proba(test)) < log_loss(labels, plain.predict_proba(test))
    uncalibrated = fitted.decision_function(test) / fitted.result_.scale
    assert log_loss(labels, fitted.predict_proba(test)) < log_loss(
        labels, torch.from_numpy(uncalibrated).softmax(1).numpy()
    )


def test_result_tells_what_was_chosen(digits, fitted):
    result = fitted.result_
    assert 0 < result.ridge < 10
    assert 0 < result.shrinkage <= 1
    assert result.folds == 4  # the smallest class has four samples
    assert result.held_out == len(digits[0][1])
    assert result.passes > 10
    assert result.seconds > 0
    for estimate in (result.natural, result.balanced):
        assert 0 <= estimate.low <= estimate.accuracy <= estimate.high <= 1
        assert estimate.nll > 0
        assert 0 <= estimate.ece < 0.1


def test_a_target_prior_is_a_shift_of_logits(digits, fitted):
    test = digits[1][0]
    log_prior = np.log(fitted.class_counts_ / fitted.class_counts_.sum())
    for prior, shift in (("train", log_prior), (0.5, 0.5 * log_prior), (0, 0 * log_prior)):
        changed = fitted.with_target_prior(prior)
        moved = changed.decision_function(test) - fitted.decision_function(test)
        np.testing.assert_allclose(moved, np.broadcast_to(shift, moved.shape), atol=1e-9)
        np.testing.assert_allclose(
            changed.predict_proba(test), Probe(prior).fit(*digits[0]).predict_proba(test), atol=1e-9
        )
    assert fitted.target_prior == "uniform"


def test_a_class_of_weight_0_is_never_predicted(digits, fitted):
    weights = dict.fromkeys(range(10), 1.0) | {3: 0.0}
    changed = fitted.with_target_prior(weights)
    assert 3 in fitted.predict(digits[1][0])
    assert 3 not in changed.predict(digits[1][0])
    assert (changed.predict_proba(digits[1][0])[:, 3] == 0).all()
    np.testing.assert_array_equal(
        changed.predict(digits[1][0]), fitted.with_target_prior(list(weights.values())).predict(digits[1][0])
    )


def test_the_head_is_one_linear_layer(digits, fitted):
    test = digits[1][0]
    logits = test @ fitted.head_.weight.T + fitted.head_.bias
    np.testing.assert_allclose(logits, fitted.decision_function(test), atol=1e-9)
    layer = fitted.to_linear()
    assert isinstance(layer, torch.nn.Linear)
    np.testing.assert_allclose(layer(torch.from_numpy(test).float()).detach(), logits, atol=1e-3)


def test_names_tables_tensors_and_types_give_the_same_fit(digits, fitted, tmp_path):
    (X, y), (test, _) = digits  # noqa: N806
    names = np.array([f"digit {number}" for number in range(10)])
    expected = fitted.predict_proba(test)

    def same(features, labels, tests, tolerance=1e-9):
        probabilities = np.asarray(Probe().fit(features, labels).predict_proba(tests))
        np.testing.assert_allclose(probabilities, expected, atol=tolerance)

    same(
        pd.DataFrame(X, columns=[f"f{n}" for n in range(64)]),
        names[y],
        pd.DataFrame(test, columns=[f"f{n}" for n in range(64)]),
    )
    same(torch.from_numpy(X), torch.from_numpy(y), torch.from_numpy(test))
    same(X.astype(np.float16), y, test.astype(np.float16))  # sixteenths are exact in half precision
    np.save(tmp_path / "x.npy", X.astype(np.float32))
    same(np.load(tmp_path / "x.npy", mmap_mode="r"), y, test.astype(np.float32), 1e-6)
    assert torch.is_tensor(fitted.predict_proba(torch.from_numpy(test)))
    assert Probe().fit(X, names[y]).predict(test)[0] == names[fitted.predict(test)[0]]
    sparse = Probe().fit(csr_matrix(X), y)
    assert balanced_accuracy_score(digits[1][1], sparse.predict(csr_matrix(test))) > 0.85
    np.testing.assert_allclose(sparse.predict_proba(test), sparse.predict_proba(csr_matrix(test)), atol=1e-9)


def test_tools_of_scikit_learn(digits, fitted):
    (X, y), (test, labels) = digits  # noqa: N806
    folds = StratifiedKFold(2)
    assert (cross_val_predict(Probe(), X, y, cv=folds) == y).mean() > 0.85
    search = GridSearchCV(
        make_pipeline(StandardScaler(), Probe()), {"probe__target_prior": ["uniform", "train"]}, cv=folds
    ).fit(X, y)
    assert search.best_params_ == {"probe__target_prior": "train"}  # accuracy is at the training prior
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(test), fitted.predict_proba(test))
    assert clone(fitted).get_params() == Probe().get_params()
    assert fitted.score(test, labels) == (fitted.predict(test) == labels).mean()


def test_the_same_seed_gives_the_same_head(digits, fitted):
    np.testing.assert_array_equal(Probe().fit(*digits[0]).head_.weight, fitted.head_.weight)
    other = Probe(seed=1).fit(*digits[0])
    assert (other.predict(digits[1][0]) == fitted.predict(digits[1][0])).mean() > 0.95


def test_units_of_features_do_not_matter_much(digits):
    (X, y), (test, labels) = digits  # noqa: N806
    units = np.geomspace(1e-3, 1e3, 64)
    odd = Probe().fit(X * units, y)
    assert odd.result_.scaled
    assert balanced_accuracy_score(labels, odd.predict(test * units)) > 0.85
    shifted = Probe().fit(X + 1000, y)
    np.testing.assert_allclose(shifted.predict_proba(test + 1000), Probe().fit(X, y).predict_proba(test), atol=1e-6)


def test_import_of_the_library_imports_no_scikit_learn():
    code = "import sys, longtail; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
