"""A fitted method in deployment: prediction sets, and class frequencies from unlabelled samples.

Both need scores of held-out samples by fits that have not used them (see `held_out`).

A prediction set holds as many classes as it takes to contain the true one with a given probability: split conformal
prediction. The score of a class is 1 - p, its probability p at equal classes. The samples are weighted to equal
classes, so the promise is about the mean coverage of the classes, however rare they are; a class that has few
held-out samples has none for itself.

Two samples of a rare class decide over a K-th of the coverage. So where the probabilities are right on unseen samples
(HALO), a class counts its own m samples and four more: those that the probabilities expect, with weights
p_k(x) / sum_j p_j(x) m_j over all held-out x. Methods that are fitted on training samples are too sure for that.

Paper: Podkopaev and Ramdas, Distribution-free uncertainty quantification for classification under label shift,
UAI 2021 (weights of classes in split conformal prediction).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import UserError, number
from longtail.files.tensors import as_array
from longtail.posthoc.held_out import FOLDS, out_of_fold_logits, stratified_folds
from longtail.posthoc.prior_estimate import PriorCheck, PriorEstimate, PriorEstimator, check_prior

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc
    from longtail.posthoc.inputs import FitData

FEWEST_SAMPLES = 30
FEW_OF_A_CLASS = 10
LEVELS = 1000
EXPECTED = 4.0  # samples of every class that calibrated probabilities stand for
MAX_EXPECTED, NEGLIGIBLE = 1 << 24, 1e-9  # probabilities that are read; weights that are left out


@dataclass(frozen=True)
class SetScores:
    """Scores of unseen samples, weighted to equal classes.

    Args:
        counts: (K,) unseen samples per class.
        quantiles: (1001,) of the scores, for shares 0, 0.001, … 1.
        expected: samples added to every class, as the probabilities expect them.
    """

    counts: tuple[int, ...]
    quantiles: tuple[float, ...]
    expected: float = 0.0

    @classmethod
    def of(cls, probabilities: np.ndarray, labels: np.ndarray, *, calibrated: bool = False) -> SetScores | None:
        """From probabilities at equal classes (M, K) and labels (M,) of unseen samples; None if they are too few.

        Args:
            probabilities: (M, K).
            labels: (M,).
            calibrated: whether the probabilities are right on unseen samples.
        """
        if len(labels) < FEWEST_SAMPLES:
            return None
        counts = np.bincount(labels, minlength=probabilities.shape[1])
        expected = EXPECTED if calibrated else 0.0
        scores, weights = 1 - probabilities[np.arange(len(labels)), labels], 1 / (counts + expected)[labels]
        if calibrated:
            some = probabilities[:: max(probabilities.size // MAX_EXPECTED, 1)]
            shares = np.where(counts > 0, some / (some @ counts)[:, None], 0.0)
            shares *= expected / (counts + expected) / np.maximum(shares.sum(0), np.finfo(float).tiny)
            chosen = shares > NEGLIGIBLE
            scores, weights = np.append(scores, 1 - some[chosen]), np.append(weights, shares[chosen])
        order = np.argsort(scores)
        shares = np.cumsum(weights[order]) / weights.sum()
        # Rounding must not move a share that is met exactly to the next score.
        places = np.searchsorted(shares, np.arange(LEVELS + 1) / LEVELS - 1e-9)
        quantiles = scores[order][np.minimum(places, len(scores) - 1)]
        return cls(tuple(counts.tolist()), tuple(quantiles.tolist()), expected)

    def thresholds(self, coverage: float) -> np.ndarray:
        """(K,) the largest score of a class in a set; infinite where too few samples are known.

        The new sample counts, too: it could have the largest score, and its weight is that of a sample of its class.
        """
        number("coverage", coverage, above=0, below=1)
        counts = np.array(self.counts)
        shares = coverage * (1 + 1 / np.maximum(counts + self.expected, 1) / (counts > 0).sum())
        levels = np.ceil(LEVELS * shares - 1e-9).astype(int)
        if (levels > LEVELS).all():
            raise UserError(
                f"a coverage of {coverage:g} needs more unseen samples than the {counts.sum():,} of the calibration: "
                "ask for less, or hold out more"
            )
        found = np.array(self.quantiles)[np.minimum(levels, LEVELS)]
        return np.where(levels > LEVELS, np.inf, found)

    def sets(self, probabilities: np.ndarray, coverage: float) -> np.ndarray:
        """(N, K) which classes are in the set of each sample, from probabilities at equal classes; never none."""
        chosen = 1 - probabilities <= self.thresholds(coverage)
        chosen[np.arange(len(chosen)), probabilities.argmax(1)] = True
        return np.asarray(chosen)

    @property
    def effective_number(self) -> float:
        """How many samples of equal classes tell as much as these.

        Expected samples are not counted: they make the coverage steadier, but wrong probabilities move it.
        """
        counts = np.array([count for count in self.counts if count])
        return float(len(counts) ** 2 / (1 / counts).sum())

    def promise(self, coverage: float) -> str:
        """What is promised, in words."""
        counts, number = np.array(self.counts), self.effective_number
        few, off = int((counts < FEW_OF_A_CLASS).sum()), 196 * np.sqrt(coverage * (1 - coverage) / number)
        text = (
            f"the sets contain the true class with {100 * coverage:g} % in the mean over classes; {counts.sum():,} "
            f"unseen samples, worth {number:,.0f} of equal classes, leave it uncertain by {off:.1f} points"
        )
        if not few:
            return text
        which = "every class" if few == len(counts) else f"{few:,} of {len(counts):,} classes"
        return f"{text}; nothing is promised for each class: {which} had fewer than {FEW_OF_A_CLASS} unseen samples"


def too_few_unseen() -> UserError:
    return UserError(
        f"prediction sets need {FEWEST_SAMPLES} unseen samples at least, and this classifier was fitted without them: "
        "fit it again with held-out samples"
    )


class DeploymentMixin:
    """Prediction sets and the estimate of the target prior, for methods fitted with held-out samples.

    Fitted attributes: `set_scores_`, `prior_check_`; None without enough held-out samples.
    """

    set_scores_: SetScores | None = None
    prior_check_: PriorCheck | None = None
    log_target_: np.ndarray | None = None
    """(K,) logarithm of the target prior; None for a method that has none."""

    def predict_set(self, logits: Any, features: Any = None, *, coverage: float = 0.9) -> Any:
        """Which classes belong to the prediction set of each sample, (N, K) of bool, array or tensor like the input.

        A set contains the true class with the probability `coverage`, in the mean over classes. The sets are those at
        equal classes, whatever the target prior. Nothing is guaranteed for a single class with few held-out samples.
        """
        method = cast("PostHoc", self)
        check_is_fitted(method)
        if self.set_scores_ is None:
            raise too_few_unseen()
        self.set_scores_.thresholds(coverage)  # refused before anything is computed
        scores = method._calibrated(logits, features)
        sets = self.set_scores_.sets(self._at_equal_classes(torch.as_tensor(scores).cpu()), coverage)
        return torch.from_numpy(sets).to(scores.device) if isinstance(scores, Tensor) else sets

    def _at_equal_classes(self, logits: Tensor) -> np.ndarray:
        """Probabilities (N, K) at equal classes of calibrated logits (N, K)."""
        target = 0.0 if self.log_target_ is None else np.where(np.isfinite(self.log_target_), self.log_target_, 0.0)
        return np.asarray((logits - torch.as_tensor(target)).double().softmax(1).numpy())

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

    def _score_held_out(self, data: FitData, validation: FitData) -> None:
        """Set `set_scores_` and `prior_check_` from held-out samples, each scored by a fit that has not used it."""
        method = cast("PostHoc", self)
        scored = not method.needs_features or validation.features is not None
        if validation.seen or not scored or (validation.seen_counts > 0).sum() < 2:
            return
        labels, target = validation.labels.numpy(), self.log_target_
        logits = out_of_fold_logits(method, data, validation, stratified_folds(labels, FOLDS, seed=0))
        allowed = np.ones(len(labels), bool) if target is None else np.isfinite(target)[labels]
        probabilities = self._at_equal_classes(logits)[allowed]
        self.set_scores_ = SetScores.of(probabilities, labels[allowed], calibrated=target is not None)
        if target is not None and np.isfinite(target).all():
            with np.errstate(divide="ignore"):
                log_prior = np.log(data.class_counts / data.class_counts.sum())
            self.prior_check_ = check_prior(logits.double().softmax(1).numpy(), labels, target, log_prior)
