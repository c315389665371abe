"""What a fitted method can do for a deployment: prediction sets, and class frequencies from unlabelled samples.

Both need scores of held-out samples by fits that have not seen them: methods that use held-out samples are fitted
again in folds, the others have not seen any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import UserError
from longtail.files.tensors import as_array
from longtail.posthoc.conformal import SetScores, too_few_unseen
from longtail.posthoc.held_out import require_unseen
from longtail.posthoc.prior_estimate import PriorCheck, PriorEstimate, PriorEstimator, check_prior

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc
    from longtail.posthoc.inputs import FitData

FOLDS = 5


class DeploymentMixin:
    """Prediction sets and the estimate of the target prior, for methods fitted with held-out samples.

    Fitted attributes: `set_scores_`, `prior_check_`; None without enough held-out samples.
    """

    set_scores_: SetScores | None = None
    prior_check_: PriorCheck | None = None

    def predict_set(self, logits: Any, features: Any = None, *, coverage: float = 0.9) -> Any:
        """Which classes belong to the prediction set of each sample, (N, K) of bool, array or tensor like the input.

        A set contains the true class with the probability `coverage`, in the mean over classes. The sets are those at
        equal classes, whatever the target prior. A class with few held-out samples has no promise of its own.
        """
        method = cast("PostHoc", self)
        check_is_fitted(method)
        if self.set_scores_ is None:
            raise too_few_unseen()
        self.set_scores_.thresholds(coverage)  # refused before anything is computed
        scores = method._calibrated(logits, features)
        sets = self.set_scores_.sets(_at_equal_classes(method, as_array(scores)), coverage)
        return torch.from_numpy(sets).to(scores.device) if isinstance(scores, Tensor) else sets

    def prior_estimator(self: Any) -> PriorEstimator:
        """Estimates the target prior from this method's probabilities; its `window` serves a stream."""
        if not hasattr(self, "with_target_prior"):
            raise UserError(f"{type(self).__name__} has no target prior to estimate; HALO and Probe have one")
        check_is_fitted(self)
        return PriorEstimator(self.log_prior_, self.log_target_, self.prior_check_)

    def estimate_prior(self: Any, logits: Any, features: Any = None) -> PriorEstimate:
        """The class frequencies of unlabelled samples, as a power of the training prior.

        `method.with_target_prior(estimate.power)` applies it. Refused for fewer than 30 samples, and if it fails on
        the held-out samples, whose frequencies are known.

        Args:
            logits: (N, K) of the model, or `Outputs`; labels are not read.
            features: (N, D), for methods that need them.
        """
        estimator = self.prior_estimator()
        estimator.require_usable()
        return estimator.estimate(as_array(self.predict_proba(logits, features)))

    def _try_on_unseen(self, data: FitData, validation: FitData | None) -> Self:
        """Set `set_scores_` and `prior_check_` from held-out samples."""
        method = cast("PostHoc", self)
        self.set_scores_ = self.prior_check_ = None
        if validation is None or not _is_unseen(method, data, validation):
            return self
        labels, logits = validation.labels.numpy(), unseen_logits(method, data, validation)
        target = log_target_of(method)
        allowed = np.ones(len(labels), bool) if target is None else np.isfinite(target)[labels]
        self.set_scores_ = SetScores.of(_at_equal_classes(method, logits)[allowed], labels[allowed])
        if target is not None and np.isfinite(target).all():
            with np.errstate(divide="ignore"):
                log_prior = np.log(data.class_counts / data.class_counts.sum())
            self.prior_check_ = check_prior(_softmax(logits), labels, target, log_prior)
        return self


def log_target_of(method: PostHoc) -> np.ndarray | None:
    """(K,) logarithm of the target prior of a method, or of the method inside; None if it has none."""
    inner: PostHoc | None = method
    while inner is not None:
        if hasattr(inner, "log_target_"):
            return np.asarray(inner.log_target_)
        inner = inner.wrapped
    return None


def _at_equal_classes(method: PostHoc, logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, K) at equal classes of calibrated logits (N, K)."""
    target = log_target_of(method)
    return _softmax(logits if target is None else logits - np.where(np.isfinite(target), target, 0.0))


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(torch.from_numpy(logits).double().softmax(1).numpy())


def _is_unseen(method: PostHoc, data: FitData, validation: FitData) -> bool:
    """Whether held-out samples can be scored, and are no training samples."""
    several = (validation.seen_counts > 0).sum() > 1 and (not method.needs_features or validation.features is not None)
    if not several or method.refuses_seen:  # then they were compared before the fit
        return bool(several)
    try:
        require_unseen(data, validation)
    except UserError:
        return False
    return True


def unseen_logits(method: PostHoc, data: FitData, held_out: FitData) -> np.ndarray:
    """Calibrated logits (M, K) of held-out samples, each by a fit that has not used it.

    A setting that was chosen on all of them is not chosen again.
    """
    if not method.needs_validation or method.chooses_a_setting:
        return torch.cat(list(transformed(method, held_out))).numpy()
    labels, logits = held_out.labels.numpy(), np.empty(held_out.rows.shape, np.float32)
    order = np.lexsort((np.random.default_rng(0).permutation(len(labels)), labels))
    for first in range(FOLDS):  # every class is spread over the folds
        left_out = np.sort(order[first::FOLDS])
        kept = np.setdiff1d(order, left_out)
        fitted = method.refitted(data, held_out.subset(kept)) if len(np.unique(labels[kept])) > 1 else method
        if len(left_out):
            logits[left_out] = torch.cat(list(transformed(fitted, held_out.subset(left_out)))).numpy()
    return logits


def transformed(method: PostHoc, data: FitData) -> Iterator[Tensor]:
    """Calibrated logits of chunks of samples."""
    for rows, logits in data.rows.chunks():
        features = None if data.features is None else torch.as_tensor(np.array(data.features[rows])).float()
        yield method.transform(logits, features)
