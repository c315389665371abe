"""Post-hoc methods as scikit-learn estimators: its own checks, and its tools on real logits.

The checks bring data of their own: a few columns, any number of classes. Where that cannot be
logits the failure is declared below; `longtail.sklearn.CalibratedLongTail` puts a classifier before
each method, and the same checks run on it whole (tests/test_sklearn.py).
"""

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import longtail
from longtail import Outputs

COLUMNS = "the check's data have more classes than columns: a method takes one logit per class"
SAMPLES = "the check's data have a column whose class has no sample: refused, for nothing could be fitted there"
NAMES = "the check's labels are objects, fewer than the columns: refused, as names need one column each"
NUMBERS = "the check's integer labels are not the numbers of the columns: refused, as off by one"

DECLARED = {
    "check_classifier_data_not_an_array": NUMBERS,
    "check_classifiers_classes": COLUMNS,
    "check_classifiers_train": COLUMNS,
    "check_dtype_object": NAMES,
    "check_estimators_dtypes": SAMPLES,
    "check_estimators_fit_returns_self": COLUMNS,
    "check_estimators_nan_inf": SAMPLES,
    "check_estimators_overwrite_params": COLUMNS,
    "check_estimators_pickle": SAMPLES,
    "check_n_features_in_after_fitting": SAMPLES,
    "check_pipeline_consistency": SAMPLES,
    "check_positive_only_tag_during_fit": COLUMNS,
    "check_readonly_memmap_input": COLUMNS,
    "check_transformer_data_not_an_array": SAMPLES,
    "check_transformer_general": SAMPLES,
    "check_transformer_preserve_dtypes": SAMPLES,
}
DECLARED_WITH_STEPS = {"check_non_transformer_estimators_n_iter": SAMPLES, "check_transformer_n_iter": SAMPLES}


class OnItsLogits:
    """A method that needs features is given the logits for them, as the checks know of no features."""

    def fit(self, X, y=None):  # noqa: N803
        return super().fit(X, y, features=X)

    def _calibrated(self, logits, features):
        return super()._calibrated(logits, logits)


class CRTOnItsLogits(OnItsLogits, longtail.posthoc.CRT):
    pass


class DisAlignOnItsLogits(OnItsLogits, longtail.posthoc.DisAlign):
    pass


METHODS = [
    longtail.MARC(),
    longtail.MARC(solver="sgd", max_iter=20),
    longtail.posthoc.LWS(),
    longtail.posthoc.TauNorm(tau=1.0),
    longtail.posthoc.LogitAdjustment(),
    longtail.posthoc.TemperatureScaling(),
    longtail.posthoc.VectorScaling(),
    longtail.posthoc.MatrixScaling(),
    longtail.posthoc.PlattScaling(),
    CRTOnItsLogits(),
    DisAlignOnItsLogits(max_iter=20),
]


def declared(method):
    checks = {**DECLARED, **(DECLARED_WITH_STEPS if hasattr(method, "max_iter") else {})}
    if isinstance(
        method, longtail.posthoc.TemperatureScaling | longtail.posthoc.TauNorm
    ):  # a class needs no sample there
        checks = {name: reason for name, reason in checks.items() if reason != SAMPLES}
        del checks["check_positive_only_tag_during_fit"]
        checks["check_classifiers_one_label"] = "they keep the classifier's decisions, whatever labels they see"
    return checks


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_checks_of_scikit_learn(method):
    expected = declared(method)
    results = check_estimator(method, expected_failed_checks=expected, on_skip=None)  # raises for what is not declared
    as_declared = {result["check_name"] for result in results if result["status"] == "xfail"}
    assert as_declared == set(expected)  # an exception that is no longer needed is taken out
    passed = [result for result in results if result["status"] == "passed"]
    assert len(passed) > 1.5 * len(expected)


@pytest.fixture(scope="module")
def real():
    """Logits of a linear classifier of the digits, long-tailed: 150 images of the 0, 6 of the 9."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    X, y = load_digits(return_X_y=True)  # noqa: N806
    X = X / 16  # noqa: N806
    counts = np.geomspace(150, 6, 10).astype(int)
    train = np.concatenate([np.flatnonzero(y == label)[:count] for label, count in enumerate(counts)])
    test = np.setdiff1d(np.arange(len(y)), train)
    model = LogisticRegression(C=0.1).fit(X[train], y[train])
    logits = model.decision_function(X).astype(np.float32)
    return {"train": (logits[train], y[train]), "test": (logits[test], y[test]), "features": X, "rows": train}


def table_of(logits):
    return pd.DataFrame(logits, columns=[f"class {number}" for number in range(logits.shape[1])])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_tables_keep_their_names_and_precision_is_kept(method, real):
    logits, y = real["train"]
    table = table_of(logits)
    method = clone(method).set_output(transform="pandas").fit(table, y)
    repaired = method.transform(table)
    assert list(repaired) == list(method.get_feature_names_out()) == list(table)
    assert (repaired.dtypes == np.float32).all()
    assert (method.predict(table) == repaired.to_numpy().argmax(1)).all()
    assert isinstance(method.predict_proba(table), np.ndarray)
    with pytest.raises(ValueError, match="feature names should match"):
        method.transform(table.rename(columns=str.upper))
    plain = clone(method).set_output(transform="default").fit(logits, y)
    assert plain.transform(logits.astype(np.float64)).dtype == np.float64
    assert not hasattr(plain.fit(torch.from_numpy(logits), torch.from_numpy(y)), "feature_names_in_")


@pytest.mark.parametrize(
    ("method", "setting", "values"),
    [
        (longtail.MARC(), "gamma", [0.0, 0.6, 1.2]),
        (longtail.posthoc.LogitAdjustment(), "tau", [0.0, 0.5, 1.0]),
        (longtail.posthoc.TauNorm(tau=1.0), "tau", [0.0, 1.0]),
        (DisAlignOnItsLogits(max_iter=100), "gamma", [0.0, 1.2]),
    ],
    ids=str,
)
def test_grid_search_over_a_pipeline(method, setting, values, real):
    logits, y = real["train"]
    steps = make_pipeline(FunctionTransformer(), method)
    name = f"{type(method).__name__.lower()}__{setting}"
    folds = StratifiedKFold(3)
    search = GridSearchCV(steps, {name: values}, scoring="balanced_accuracy", cv=folds).fit(logits, y)
    assert search.best_params_[name] in values
    assert search.score(*real["test"]) > 0.5
    if not isinstance(method, longtail.posthoc.TauNorm):  # without norms of a head it has nothing to do
        assert search.best_params_[name] > 0  # a long tail asks for some repair
        assert np.ptp(search.cv_results_["mean_test_score"]) > 0


def test_methods_compose_with_further_steps(real):
    logits, y = real["train"]
    both = make_pipeline(longtail.MARC(), longtail.posthoc.TemperatureScaling()).fit(logits, y)
    assert (both.predict(logits) == longtail.MARC().fit(logits, y).predict(logits)).all()


def test_features_are_routed_to_methods_that_need_them(real):
    (logits, y), features = real["train"], real["features"][real["rows"]]
    with sklearn.config_context(enable_metadata_routing=True):
        method = longtail.posthoc.CRT(max_iter=2000).set_fit_request(features=True).set_score_request(features=True)
        scores = cross_val_score(method, logits, y, cv=3, params={"features": features})
    assert scores.mean() > 0.8
    outputs = Outputs(y, np.bincount(y), logits=logits, features=features)
    method = longtail.posthoc.CRT(max_iter=2000).fit(outputs)
    assert method.score(outputs) == method.score(logits, y, features=features) > 0.9
