"""Which post-hoc method suits a model: each is tried on held-out samples that its fit has not seen.

Methods fitted on training outputs are scored on the held-out ones as they are. HALO takes part of its
numbers from held-out samples: it is fitted in folds, each sample scored by the fit that left it out.

The score is the log-likelihood at the target prior: every class counts as much as the target prior
says, whatever the held-out set holds. Each candidate is given its own best temperature, fitted on the
other folds, so that the choice is one of decisions: overconfidence is what a temperature corrects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.errors import UserError
from longtail.posthoc.base import AffinePostHoc, PostHoc
from longtail.posthoc.crt import CRT
from longtail.posthoc.halo import HALO, WAYS
from longtail.posthoc.inputs import FitData
from longtail.posthoc.likelihood import best_scale, log_likelihood
from longtail.posthoc.logit_adjustment import LogitAdjustment
from longtail.posthoc.marc import MARC
from longtail.posthoc.result import FitResult
from longtail.posthoc.target_prior import log_target, shifted
from longtail.posthoc.unseen import require_unseen

FOLDS = 5
SURE = 2.0  # standard errors by which a method must be better than the unchanged model


class Unchanged(AffinePostHoc):
    """The unchanged model."""

    needs_every_class = False

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        self.scale_, self.shift_ = np.ones(data.num_classes), np.zeros(data.num_classes)
        self.result_ = FitResult.closed_form()

    @property
    def n_parameters_(self) -> int:
        return 0


@dataclass(frozen=True)
class Candidate:
    """A fitted method and its scores on held-out samples.

    Args:
        name: in `longtail methods`.
        method: the method, fitted on all data.
        target_shift: (K,) added to its logits to reach the target prior.
        likelihood: (M,) log-likelihood of each held-out sample, by a fit that has not seen it.
        hits: (M,) whether each prediction is correct.
    """

    name: str
    method: PostHoc
    target_shift: np.ndarray
    likelihood: np.ndarray
    hits: np.ndarray


@dataclass(frozen=True)
class Trial:
    """All candidates, the simplest first, and the weight of each held-out sample (M,), summing to 1."""

    candidates: list[Candidate]
    weights: np.ndarray

    def mean(self, candidate: Candidate) -> float:
        """Log-likelihood at the target prior."""
        return float(self.weights @ candidate.likelihood)

    def difference(self, first: Candidate, second: Candidate) -> tuple[float, float]:
        """Log-likelihood of the first minus that of the second on the same samples, and its standard error."""
        change = first.likelihood - second.likelihood
        mean = float(self.weights @ change)
        return mean, float(np.sqrt(np.square(self.weights * (change - mean)).sum()))

    @property
    def chosen(self) -> Candidate:
        """The unchanged model, or of the clearly better ones the simplest within one standard error of the best."""
        as_it_is = self.candidates[0]
        better = [other for other in self.candidates[1:] if self._surely_better(other, as_it_is)]
        if not better:
            return as_it_is
        best = max(better, key=self.mean)
        return next(other for other in better if other is best or self._within_one_error(best, other))

    def _surely_better(self, first: Candidate, second: Candidate) -> bool:
        gain, error = self.difference(first, second)
        return gain > SURE * error

    def _within_one_error(self, best: Candidate, other: Candidate) -> bool:
        gain, error = self.difference(best, other)
        return gain <= error


def try_candidates(train: FitData | None, held_out: FitData | None, target_prior: Any, seed: int = 0) -> Trial:
    """Fit softmax (nothing), logit adjustment, MARC, cRT and HALO, and score them on held-out samples.

    Without training outputs MARC is fitted on held-out ones, in folds, and cRT and HALO are left out.
    """
    if held_out is None:
        raise UserError(f"methods are compared on images that the network has not seen, but there are none: {WAYS}")
    if train is None:
        _require_two_of_each(held_out)
    else:
        require_unseen(train, held_out)
    known = train or held_out
    log_prior = np.log(known.class_counts / known.class_counts.sum())
    target = log_target(target_prior, log_prior, known.class_names)
    folds = stratified(held_out.labels.numpy(), FOLDS, seed)
    weights = target_weights(held_out, target)
    candidates = []
    for name, method in _methods(train, held_out):
        method.fit_checked(known, held_out)
        shift = _shift_of(method, target)
        scores = _unseen_scores(method, train, held_out, folds)
        candidates.append(_scored(name, method, shift, scores, held_out, weights, folds))
    return Trial(candidates, weights)


def _require_two_of_each(held_out: FitData) -> None:
    scarce = int(np.argmin(held_out.seen_counts))
    if held_out.seen_counts[scarce] < 2:
        raise UserError(
            f"class {held_out.class_names[scarce]} has {held_out.seen_counts[scarce]} held-out samples; at least 2 of "
            "every class are needed to try calibration on parts of them, or training outputs (--train)"
        )


def _methods(train: FitData | None, held_out: FitData) -> list[tuple[str, PostHoc]]:
    """The candidates, the simplest first; without features those that need none."""
    methods: list[tuple[str, PostHoc]] = [("softmax", Unchanged()), ("logit-adjustment", LogitAdjustment())]
    methods.append(("marc", MARC()))
    if train is None:
        return methods
    if train.features is not None and held_out.features is not None:
        methods.append(("crt", CRT()))
    return [*methods, ("halo", HALO())]


def _shift_of(method: PostHoc, target: np.ndarray) -> np.ndarray:
    """The shift (K,) from the uniform prior to the target prior; the unchanged model only drops classes of weight 0."""
    return np.where(np.isneginf(target), target, 0.0) if isinstance(method, Unchanged) else target


def target_weights(held_out: FitData, target: np.ndarray) -> np.ndarray:
    """(M,) weights under which held-out samples are distributed like the target prior, summing to 1."""
    present = held_out.seen_counts > 0
    if present.sum() < 2:
        raise UserError(f"the held-out samples are of {present.sum()} class; two classes at least are needed")
    of_class = np.exp(target - target.max()) / np.maximum(held_out.seen_counts, 1)
    weights = of_class[held_out.labels.numpy()]
    if not weights.any():
        raise UserError("the target prior is 0 for every class that has held-out samples")
    return np.asarray(weights / weights.sum())


def stratified(labels: np.ndarray, number: int, seed: int) -> np.ndarray:
    """(M,) fold of each sample; every class is spread evenly over the folds."""
    rng = np.random.default_rng(seed)
    fold = np.empty(len(labels), dtype=np.int64)
    passed = 0
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(labels == label))
        fold[own] = (passed + np.arange(len(own))) % number
        passed += len(own)
    return fold


def _unseen_scores(method: PostHoc, train: FitData | None, held_out: FitData, folds: np.ndarray) -> Tensor:
    """Calibrated logits (M, K) of held-out samples, each by a fit that has not seen it."""
    in_folds = isinstance(method, HALO) or (train is None and isinstance(method, MARC))
    if not in_folds:
        return torch.cat(list(_applied(method, held_out)))
    scores = torch.empty(held_out.rows.shape)
    for fold in np.unique(folds):
        left, kept = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        fitted = _refitted(method, train, held_out.part(kept))
        scores[torch.from_numpy(left)] = torch.cat(list(_applied(fitted, held_out.part(left))))
    return scores


def _refitted(method: PostHoc, train: FitData | None, held_out: FitData) -> PostHoc:
    """The method, with the part that uses held-out samples fitted on these."""
    if train is None:
        return MARC().fit_checked(held_out, None)
    assert isinstance(method, HALO)
    return method.refitted(train, held_out) if (held_out.seen_counts > 0).sum() > 1 else method


def _applied(method: PostHoc, data: FitData) -> Iterator[Tensor]:
    for rows, logits in data.rows.chunks():
        features = None if data.features is None else torch.as_tensor(np.array(data.features[rows])).float()
        yield method.transform(logits, features)


def _scored(
    name: str,
    method: PostHoc,
    shift: np.ndarray,
    scores: Tensor,
    held_out: FitData,
    weights: np.ndarray,
    folds: np.ndarray,
) -> Candidate:
    """A candidate with its log-likelihoods over the classes that have held-out samples."""
    labels = held_out.labels
    hits = (shifted(scores, shift).argmax(1) == labels).numpy()
    present = np.flatnonzero((held_out.seen_counts > 0) & ~np.isneginf(shift))
    place = np.full(held_out.num_classes, -1)
    place[present] = np.arange(len(present))
    codes = torch.from_numpy(place[labels.numpy()])
    offset = torch.from_numpy(shift[present])
    columns = scores[:, torch.from_numpy(present)].double()
    likelihood = np.zeros(len(labels))
    known = (codes >= 0).numpy()  # a class that never occurs under the target prior has weight 0
    for fold in np.unique(folds):
        left, kept = known & (folds == fold), known & (folds != fold)
        scale = best_scale(columns[kept], codes[kept], offset, weights[kept]) if kept.any() else 1.0
        likelihood[left] = log_likelihood(columns[left], codes[left], offset, scale).numpy()
    return Candidate(name, method, shift, likelihood, hits)
