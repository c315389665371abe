"""Probe: embeddings in, a linear head for long-tailed classes out.

Features x come from a backbone that was never trained on these samples. One ridge head eta = W x + b is fitted with
natural class weights (see `ridge_head`); its metric and ridge are those that explain held-out samples best, half-way
between head and tail (see `choice`). Then

    logits = A (eta - log pi) + log q

with the training prior pi, the target prior q, and A fitted on scores of samples that the head has not seen (see
`result`). All of it is one linear layer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import choose, number, whole_number
from longtail.files.records import FORMAT
from longtail.files.tensors import as_array
from longtail.posthoc.deployment import too_few_unseen
from longtail.posthoc.prior_estimate import PriorEstimate, PriorEstimator
from longtail.posthoc.probe.fitting import fit_head
from longtail.posthoc.probe.inputs import Rows, check_features, check_labels, log_target_prior
from longtail.posthoc.probe.result import ProbeResult


class Probe(ClassifierMixin, BaseEstimator):
    """A linear classifier of long-tailed classes on frozen features.

    Args:
        target_prior: class frequencies to be right for: "uniform" (balanced recognition), "train" (as in training),
            a power of the training prior (1 is "train", 0 is "uniform"), weights or counts (K,), weights by class in a
            dict, or a CSV file of class,weight; a class of weight 0 is never predicted. `with_target_prior` changes it
            later.
        classes: all classes, if `y` may lack some of them.
        unseen: a class without samples is "never" predicted, or predicted by its "prior": no feature counts for or
            against it.
        tolerance: scaled gradient at the end of a solve, relative to the root of the objective.
        seed: decides the folds.

    Fitted attributes: `classes_` (K,), `n_features_in_`, `feature_names_in_` (of a table), `head_` (weight and bias
    of the linear layer), `class_counts_` (K,), `log_prior_` (K,), `log_target_` (K,), `result_` (what was chosen, and
    honest estimates of the scores, from samples that the scoring head had not seen).

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> probe = Probe().fit(X[:120], y[:120])
    >>> probe.predict(X[:2]).tolist(), probe.with_target_prior("train").result_.folds
    ([0, 0], 5)
    """

    result_: ProbeResult

    def __init__(
        self,
        target_prior: Any = "uniform",
        *,
        classes: Sequence[Any] | None = None,
        unseen: Literal["never", "prior"] = "never",
        tolerance: float = 0.05,
        seed: int = 0,
    ) -> None:
        self.target_prior = target_prior
        self.classes = classes
        self.unseen = unseen
        self.tolerance = tolerance
        self.seed = seed

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Fit on features (N, D), dense or sparse, and labels (N,) of any type."""
        choose("unseen", self.unseen, ("never", "prior"))
        number("tolerance", self.tolerance, above=0, below=1)
        whole_number("seed", self.seed, at_least=0)
        features = check_features(self, X, reset=True)
        classes, codes = check_labels(y, features.shape[0], self.classes)
        counts = np.bincount(codes, minlength=len(classes))
        return self.fit_codes(features, codes, classes, counts, [str(name) for name in classes])

    def fit_codes(
        self,
        features: Any,
        codes: np.ndarray,
        classes: np.ndarray,
        class_counts: np.ndarray,
        names: Sequence[str],
        world: World = SINGLE_PROCESS,
        report: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Fit on checked features (N, D) and class indices (N,); the processes of `world` share the work.

        Args:
            features: of a floating type, all finite; a sparse matrix is in CSR format.
            codes: (N,) int64, at least two of 0..K-1.
            classes: (K,) the user's labels of the classes.
            class_counts: (K,) training samples, 0 for a class without samples here.
            names: (K,) of the classes in a target prior.
            world: processes, each of which can read all features.
            report: called with a line on what is being fitted.
        """
        self.classes_, self.class_counts_, self.n_features_in_ = classes, class_counts, features.shape[1]
        with np.errstate(divide="ignore"):
            self.log_prior_ = np.log(class_counts / class_counts.sum())
        self._names = names
        self._log_target(self.target_prior)  # refused before anything is computed
        self._fitted = fit_head(
            features, codes, len(classes), seed=self.seed, tolerance=self.tolerance, world=world, report=report
        )
        self.result_ = self._fitted.result
        if not self.result_.converged:
            warnings.warn(f"Probe: not solved in {self.result_.passes} passes", ConvergenceWarning, stacklevel=2)
        self._set_target(self.target_prior)
        return self

    def _log_target(self, target_prior: Any) -> np.ndarray:
        return log_target_prior(target_prior, self.log_prior_, self._names, unseen=self.unseen)

    def _set_target(self, target_prior: Any) -> None:
        self.log_target_ = self._log_target(target_prior)
        self.target_prior = target_prior
        self._centred = self._fitted.on_centred(self.log_target_)
        self.head_ = self._fitted.on_features(self.log_target_)

    def with_target_prior(self, target_prior: Any) -> Self:
        """The same fit for another distribution of classes; nothing is fitted again."""
        check_is_fitted(self)
        changed = copy.copy(self)
        changed._set_target(target_prior)
        return changed

    def prior_estimator(self) -> PriorEstimator:
        """Estimates the target prior from this method's probabilities; its `window` serves a stream."""
        check_is_fitted(self)
        target = log_target_prior(self.target_prior, self.log_prior_, self.classes_)
        return PriorEstimator(self.log_prior_, target, self.result_.prior_check)

    def estimate_prior(self, X: Any) -> PriorEstimate:  # noqa: N803
        """The class frequencies of unlabelled samples with features (N, D), as a power of the training prior.

        `probe.with_target_prior(estimate.power)` applies it. Refused for fewer than 30 samples, and if it fails on
        training samples that were held out, whose frequencies are known.
        """
        estimator = self.prior_estimator()
        estimator.require_usable()
        return estimator.estimate(as_array(self.predict_proba(X)))

    def predict_set(self, X: Any, *, coverage: float = 0.9) -> np.ndarray:  # noqa: N803
        """Which classes belong to the prediction set of each sample, (N, K) of bool.

        A set contains the true class with the probability `coverage`, in the mean over classes. The sets are those at
        equal classes, whatever the target prior. A class with few samples has no promise of its own.
        """
        check_is_fitted(self)
        scores = self.result_.set_scores
        if scores is None:
            raise too_few_unseen()
        scores.thresholds(coverage)  # refused before anything is computed
        balanced = as_array(self.with_target_prior("uniform").predict_proba(X))
        sets, present = np.zeros(balanced.shape, bool), np.flatnonzero(self.class_counts_)
        sets[:, present] = scores.sets(balanced[:, present], coverage)
        return sets

    def to_dict(self) -> dict[str, Any]:
        """The fit as plain values, the content of `probe.json`: classes, class frequencies, estimates of scores."""
        target = np.exp(self.log_target_ - np.logaddexp.reduce(self.log_target_))
        return {
            "format": FORMAT,
            "kind": "probe",
            "logits": "features @ weight.T + bias of the linear layer, right for the target frequencies",
            "classes": self.classes_.tolist(),
            "class_counts": self.class_counts_.tolist(),
            "target_prior": str(self.target_prior),
            "target_frequencies": target.tolist(),
            "result": asdict(self.result_),
        }

    def to_linear(self) -> nn.Linear:
        """The fitted head as a layer on features (N, D), float32."""
        check_is_fitted(self)
        layer = nn.Linear(self.n_features_in_, len(self.classes_))
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(self.head_.weight))
            layer.bias.copy_(torch.from_numpy(self.head_.bias))
        return layer

    def _logits(self, X: Any) -> Iterator[Tensor]:  # noqa: N803
        """Logits of chunks of rows, (B, K) each."""
        rows = Rows(check_features(self, X, reset=False), columns=len(self.classes_))
        weight, bias, centre = (
            torch.from_numpy(values).to(rows.dtype)
            for values in (self._centred.weight, self._centred.bias, self._fitted.centre)
        )
        for _, chunk in rows.chunks(weight, centre):
            yield chunk.scores(bias)

    def decision_function(self, X: Any) -> Any:  # noqa: N803
        """Logits (N, K); for two classes, the second logit minus the first, (N,)."""
        check_is_fitted(self)
        logits = torch.cat(list(self._logits(X)))
        return _like(X, logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """Probabilities (N, K) at the target prior."""
        check_is_fitted(self)
        return _like(X, torch.cat([logits.softmax(1) for logits in self._logits(X)]))

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """The most probable class of each sample."""
        check_is_fitted(self)
        return self.classes_[torch.cat([logits.argmax(1) for logits in self._logits(X)]).numpy()]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _like(given: Any, values: Tensor) -> Any:
    """A tensor for a tensor, an array for everything else, in the precision of the input but at least single."""
    double = getattr(given, "dtype", None) in (None, np.dtype(np.float64), torch.float64)
    values = values if double else values.float()
    return values.to(given.device) if isinstance(given, Tensor) else values.numpy()
