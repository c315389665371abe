"""A trial of post-hoc methods on held-out samples: each is scored on samples that its fit has not used.

Methods fitted on training outputs are scored on the held-out ones as they are. Methods that use held-out samples
(HALO) are fitted in folds, each sample scored by the fit that left it out.

The score is the log-likelihood at the target prior: every class has the weight of the target prior, however many
held-out samples it has. Each candidate gets its best temperature, fitted on the other folds, so that the choice is
about decisions: overconfidence is what a temperature corrects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.errors import UserError
from longtail.posthoc.affine import AffinePostHoc
from longtail.posthoc.base import PostHoc
from longtail.posthoc.crt import CRT
from longtail.posthoc.halo import HALO
from longtail.posthoc.held_out import (
    FOLDS,
    HOW_TO_HOLD_OUT,
    compared_with_training,
    out_of_fold_logits,
    stratified_folds,
)
from longtail.posthoc.inputs import FitData
from longtail.posthoc.logit_adjustment import LogitAdjustment
from longtail.posthoc.marc import MARC
from longtail.posthoc.priors import best_scale, log_likelihood, log_target, shifted
from longtail.posthoc.solver import FitResult


class Unchanged(AffinePostHoc):
    """The unchanged model."""

    needs_every_class = False
    learns_from_seen = False

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

    @property
    def chosen(self) -> Candidate:
        """HALO where it was tried: it loses least to the best (docs/results/regret.md); else the likeliest."""
        return next((one for one in self.candidates if one.name == "halo"), max(self.candidates, key=self.mean))


def try_candidates(train: FitData | None, held_out: FitData | None, target_prior: Any, seed: int = 0) -> Trial:
    """Fit softmax (the unchanged model), logit adjustment, MARC, cRT and HALO, and score them on held-out samples.

    Without training outputs MARC is fitted on held-out ones, in folds, and cRT and HALO are left out.
    """
    if held_out is None:
        raise UserError(
            f"methods are compared on images that the network has not seen, but there are none: {HOW_TO_HOLD_OUT}"
        )
    if train is None:
        _require_two_of_each(held_out)
    else:
        compared_with_training(train, held_out, refuse=True)
    data = train or held_out
    log_prior = np.log(data.class_counts / data.class_counts.sum())
    target = log_target(target_prior, log_prior, data.class_names)
    folds = stratified_folds(held_out.labels.numpy(), FOLDS, seed)
    weights = target_weights(held_out, target)
    candidates = []
    for name, method in _methods(train, held_out).items():
        method.fit_checked(data, held_out, judge=False)
        # The unchanged model is not moved to the target prior; it only drops classes of weight 0.
        shift = np.where(np.isneginf(target), target, 0.0) if name == "softmax" else target
        scores = out_of_fold_logits(method, data, held_out, folds)
        hits = (shifted(scores, shift).argmax(1) == held_out.labels).numpy()
        likelihood = _likelihood(scores, shift, held_out, weights, folds)
        candidates.append(Candidate(name, method, shift, likelihood, hits))
    return Trial(candidates, weights)


def _require_two_of_each(held_out: FitData) -> None:
    scarce = int(np.argmin(held_out.seen_counts))
    if held_out.seen_counts[scarce] < 2:
        raise UserError(
            f"class {held_out.class_names[scarce]} has {held_out.seen_counts[scarce]} held-out samples; at least 2 of "
            "every class are needed to try calibration on parts of them, or training outputs (--train)"
        )


def _methods(train: FitData | None, held_out: FitData) -> dict[str, PostHoc]:
    """The candidates, the simplest first; without features those that need none."""
    methods: dict[str, PostHoc] = {"softmax": Unchanged(), "logit-adjustment": LogitAdjustment(), "marc": MARC()}
    if train is None:
        return methods
    if train.features is not None and held_out.features is not None:
        methods["crt"] = CRT()
    return {**methods, "halo": HALO()}


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


def _likelihood(
    scores: Tensor, shift: np.ndarray, held_out: FitData, weights: np.ndarray, folds: list[np.ndarray]
) -> np.ndarray:
    """(M,) log-likelihoods over the classes that have held-out samples, at the best temperature of the other folds."""
    present = np.flatnonzero((held_out.seen_counts > 0) & ~np.isneginf(shift))
    columns = np.full(held_out.num_classes, -1)
    columns[present] = np.arange(len(present))
    codes = torch.from_numpy(columns[held_out.labels.numpy()])
    offset = torch.from_numpy(shift[present])
    present_scores = scores[:, torch.from_numpy(present)].double()
    likelihood = np.zeros(len(codes))
    expected = (codes >= 0).numpy()  # a class that never occurs under the target prior has weight 0
    for fold in folds:
        in_fold = np.isin(np.arange(len(codes)), fold)
        left_out, kept = expected & in_fold, expected & ~in_fold
        scale = best_scale(present_scores[kept], codes[kept], offset, weights[kept]) if kept.any() else 1.0
        likelihood[left_out] = log_likelihood(present_scores[left_out], codes[left_out], offset, scale).numpy()
    return likelihood
