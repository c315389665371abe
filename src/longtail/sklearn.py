"""Any scikit-learn classifier, calibrated: its scores become logits, a post-hoc method calibrates them.

    CalibratedLongTail(LinearSVC(), MARC()).fit(X, y).predict(X_new)

Scores of samples that a classifier was trained on are overconfident, most of all for small classes.
So the method is fitted on cross-validated scores, or, with `cv="prefit"`, on held-out data.
"""

# ruff: noqa: N803 (X is scikit-learn's name)
from __future__ import annotations

import warnings
from numbers import Integral
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.utils import assert_all_finite, get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_memory, column_or_1d

from longtail.errors import UserError
from longtail.posthoc.base import PostHoc, unfitted
from longtail.posthoc.gate import FitWarning
from longtail.posthoc.marc import MARC

FOLDS = 5
ENOUGH = 50  # samples: that a classifier makes no error on fewer is no sign that it has seen them
SMALLEST_PROBABILITY = 1e-6  # lower bound, so that a class with probability 0 has a finite logit


class CalibratedLongTail(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier of long-tailed data whose scores are calibrated class by class.

    Args:
        estimator: a classifier with `decision_function` (used if it has one) or `predict_proba`
            (default: `LogisticRegression()`).
        method: a post-hoc method that works on logits (default: `MARC()`).
        cv: folds of the cross-validation (default: 5), anything scikit-learn takes for them, or "prefit":
            the estimator is fitted already and `fit` is given held-out data. A `FrozenEstimator` is prefit.
        n_jobs: processes of the cross-validation.
        memory: a folder (or `joblib.Memory`) that keeps the fitted estimator and its cross-validated scores; the same
            estimator on the same data is then not fitted again for another method, as in a search over `method__gamma`.

    A setting "auto" of the method is chosen on the same held-out scores.

    Fitting costs one fit of the estimator per fold, one more on all data, and a prediction of every sample.

    Fitted attributes: `estimator_` (fitted on all of the data; on class numbers where it takes no other labels),
    `method_`, `classes_` (K,).

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> CalibratedLongTail(LogisticRegression(max_iter=1000)).fit(X[40:], y[40:]).predict(X[:3]).tolist()
    [0, 0, 0]
    """

    def __init__(
        self,
        estimator: Any = None,
        method: PostHoc | None = None,
        *,
        cv: Any = None,
        n_jobs: int | None = None,
        memory: Any = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.cv = cv
        self.n_jobs = n_jobs
        self.memory = memory

    def fit(self, X: Any, y: Any, *, class_counts: Any = None, **fit_params: Any) -> Self:
        """Fit the estimator and the method on data and labels (N,) of any type.

        Args:
            X: what the estimator takes.
            y: labels.
            class_counts: (K,) training samples per class in the order of `classes_`, if they are not those
                of `y`; with "prefit", for a method that takes the training prior out.
            fit_params: for the estimator's `fit`; those with one entry per sample are split with the data.
                The method itself weighs classes, not samples.
        """
        if y is None:
            raise UserError("requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        estimator = LogisticRegression() if self.estimator is None else self.estimator
        if isinstance(self.cv, str) and self.cv != "prefit":
            raise UserError(f'cv must be a number of folds, a splitter or "prefit", not {self.cv!r}')
        if isinstance(self.cv, str) or isinstance(estimator, FrozenEstimator):
            logits, codes = self._held_out(estimator, X, y)
        else:
            kept: Any = check_memory(self.memory).cache(_cross_validated, ignore=["n_jobs"])
            folds = FOLDS if self.cv is None else self.cv
            self.classes_, codes = np.unique(y, return_inverse=True)
            self.estimator_, logits = kept(estimator, X, y, folds, fit_params, self.n_jobs)
        if fit_params.get("sample_weight") is not None:
            present = _present(fit_params["sample_weight"], codes, self.classes_)
            logits, codes = logits[present], codes[present]
        head = {**_linear_head(self.estimator_, logits.shape[1]), "class_counts": class_counts}
        if not isinstance(self.method, PostHoc | None):
            raise UserError(
                f"method must be a post-hoc method such as MARC(), not {type(self.method).__name__}; a classifier "
                "such as Probe goes in as the estimator"
            )
        self.method_ = unfitted(MARC() if self.method is None else self.method)
        if self.method_.needs_features:
            raise UserError(
                f"{type(self.method_).__name__} needs the features before a network's last layer; "
                "choose a method that works on logits, such as MARC"
            )
        # Each row is unseen by the estimator that gave it, so that the same rows serve as held-out ones.
        self.method_.fit_cross_validated(logits, codes, **head)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        return self

    def _held_out(self, estimator: Any, X: Any, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        try:
            check_is_fitted(estimator)
        except NotFittedError as error:
            raise UserError('cv="prefit" needs an estimator that is fitted already; fit it, or leave cv out') from error
        self.estimator_, self.classes_ = estimator, estimator.classes_
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise UserError(
                f"class {unknown[0]} of y is not known to the estimator, whose classes are {self.classes_.tolist()[:6]}"
            )
        logits, codes = self._logits(X), np.searchsorted(self.classes_, y)
        if len(codes) >= ENOUGH and (logits.argmax(1) == codes).all():
            warnings.warn(
                f"the estimator classifies all {len(codes):,} samples correctly: if it was trained on them, pass other "
                "samples, or leave cv out",
                FitWarning,
                stacklevel=3,
            )
        return logits, codes

    def _logits(self, X: Any) -> np.ndarray:
        response = _response(self.estimator_)
        return _as_logits(getattr(self.estimator_, response)(X), response, len(self.classes_), self.estimator_)

    def _calibrated(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return np.asarray(self.method_.transform(self._logits(X)))

    def decision_function(self, X: Any) -> np.ndarray:
        """Calibrated logits (N, K); for two classes, the second logit minus the first, (N,)."""
        calibrated = self._calibrated(X)
        return calibrated[:, 1] - calibrated[:, 0] if calibrated.shape[1] == 2 else calibrated

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (N, K) after calibration."""
        check_is_fitted(self)
        return np.asarray(self.method_.predict_proba(self._logits(X)))

    def predict(self, X: Any) -> np.ndarray:
        """The class of each sample."""
        best = self._calibrated(X).argmax(1)  # first: it checks that this is fitted
        return self.classes_[best]

    def set_params(self, **params: Any) -> Self:
        """Set settings, also of the parts that are made by default: `method__gamma` is that of `MARC()`."""
        for name, default in (("estimator", LogisticRegression), ("method", MARC)):
            inner = any(key.startswith(f"{name}__") for key in params)
            if inner and getattr(self, name) is None and name not in params:
                setattr(self, name, default())
        return super().set_params(**params)

    def set_output(self, *, transform: Any = None) -> Self:
        """Set the container that transformers inside the estimator and the method return: "default", "pandas", …"""
        for name in ("estimator", "method", "estimator_", "method_"):
            part: Any = getattr(self, name, None)
            if hasattr(part, "set_output"):
                part.set_output(transform=transform)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(LogisticRegression() if self.estimator is None else self.estimator)
        tags.input_tags = inner.input_tags
        return tags


def _cross_validated(
    estimator: Any, X: Any, y: np.ndarray, folds: Any, fit_params: Any, n_jobs: int | None
) -> tuple[Any, np.ndarray]:
    """The estimator fitted on all data, and logits (N, K) of each sample from a fit without it."""
    classes, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
    # First on all data, so that the estimator itself reports invalid data.
    fitted, y = _fitted(estimator, X, y, codes, fit_params)
    if len(classes) < 2:
        raise UserError("the data have one class only: there is nothing to choose")
    if isinstance(folds, Integral):
        folds = StratifiedKFold(min(int(folds), int(counts.max())))
        if counts.min() < 2:
            single = classes[counts.argmin()]
            raise UserError(
                f"class {single} has 1 sample; cross-validation needs 2 of each class. Add a sample, leave the "
                'class out, or fit the estimator and pass held-out data with cv="prefit"'
            )
    response = _response(estimator)
    with warnings.catch_warnings():
        # A class with fewer samples than folds is still in the training set of every fold; that is sufficient.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        warnings.filterwarnings("error", "Number of classes in training fold", RuntimeWarning)
        options = {"cv": folds, "method": response, "n_jobs": n_jobs, "params": fit_params or None}
        try:
            scores: Any = cross_val_predict(estimator, X, y, **options)
        except RuntimeWarning as error:
            raise UserError("a fold of cv leaves a class out of its training part; stratify the folds") from error
    return fitted, _as_logits(scores, response, len(classes), estimator)


def _fitted(estimator: Any, X: Any, y: np.ndarray, codes: np.ndarray, fit_params: Any) -> tuple[Any, np.ndarray]:
    """The estimator fitted on labels (N,), or on class numbers if it needs them (XGBoost); and the labels used."""
    try:
        return clone(estimator).fit(X, y, **fit_params), y
    except ValueError as error:
        if np.array_equal(y, codes):
            raise
        try:
            return clone(estimator).fit(X, codes, **fit_params), codes
        except ValueError:
            raise error from None


def _response(estimator: Any) -> str:
    for name in ("decision_function", "predict_proba"):
        if hasattr(estimator, name):
            return name
    raise UserError(
        f"{type(estimator).__name__} has neither decision_function nor predict_proba: no scores to calibrate"
    )


def _as_logits(scores: np.ndarray, response: str, classes: int, estimator: Any) -> np.ndarray:
    """Scores as logits (N, K): logarithms of probabilities; two columns from one decision."""
    if response == "predict_proba":
        return np.log(np.clip(scores, SMALLEST_PROBABILITY, None))
    if scores.ndim == 1:
        return np.stack([-scores / 2, scores / 2], axis=1)
    last = estimator[-1] if isinstance(estimator, Pipeline) else estimator
    if getattr(last, "decision_function_shape", None) == "ovo" or scores.shape[1] != classes:
        raise UserError(
            f"{type(estimator).__name__} gives {scores.shape[1]} scores for {classes} classes, one per pair; "
            'set decision_function_shape="ovr"'
        )
    return scores


def _present(sample_weight: Any, codes: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(N,) whether each sample is used: samples of weight 0 are not."""
    present = np.asarray(sample_weight) != 0
    missing = np.setdiff1d(codes, codes[present])
    if len(missing):
        raise UserError(f"every sample of class {classes[missing[0]]} has sample_weight 0; leave the class out")
    return present


def _linear_head(estimator: Any, classes: int) -> dict[str, np.ndarray]:
    """Norms and biases of the class vectors of a linear classifier; nothing for others."""
    last = estimator[-1] if isinstance(estimator, Pipeline) else estimator
    weight, bias = getattr(last, "coef_", None), getattr(last, "intercept_", None)
    if not isinstance(weight, np.ndarray) or weight.ndim != 2 or len(weight) != classes:
        return {}
    norms = np.linalg.norm(weight, axis=1)
    if not (norms > 0).all():
        return {}
    return {"weight_norms": norms, "head_bias": np.broadcast_to(0.0 if bias is None else bias, classes)}
