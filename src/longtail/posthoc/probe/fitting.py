"""The fit of Probe: choose metric and ridge, score every sample by a head that has not seen it, fit on all samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.posthoc.held_out import number_of_folds, stratified_folds
from longtail.posthoc.priors import NEVER
from longtail.posthoc.probe.choice import (
    HELD_FOR_CHOICE,
    USUAL,
    Choice,
    Fold,
    Start,
    choose_ridge,
    evidence_of,
    subsample,
)
from longtail.posthoc.probe.inputs import Rows
from longtail.posthoc.probe.result import USUAL_SCALE, ProbeResult, scores_of, tried_on
from longtail.posthoc.solver.linear import LinearHead

HELD_FOR_SCALE = 20_000  # held-out samples are enough to fit the scale and to estimate scores
MOST_SCORES = 1 << 23  # of held-out samples: 32 MB in float32; of many classes fewer samples are held out
EASIER = 10.0  # a head for so many times the ridge is solved first: fewer passes than from nothing


@dataclass(frozen=True)
class FittedHead:
    """The head without any prior, float64: evidence (N, K) = (x - centre) weight' + bias."""

    weight: np.ndarray
    bias: np.ndarray
    centre: np.ndarray
    result: ProbeResult

    def on_centred(self, log_target: np.ndarray) -> LinearHead:
        """The head on x - centre for a target prior, log q (K,); a class at -inf is never predicted."""
        never = np.isneginf(log_target)
        bias = np.where(never, NEVER, self.bias + np.where(never, 0.0, log_target))
        return LinearHead(np.where(never[:, None], 0.0, self.weight), bias)

    def on_features(self, log_target: np.ndarray) -> LinearHead:
        """The same on x as it is."""
        head = self.on_centred(log_target)
        return LinearHead(head.weight, head.bias - head.weight @ self.centre)


def fit_head(
    features: Any,
    codes: np.ndarray,
    num_classes: int,
    *,
    seed: int,
    tolerance: float,
    world: World = SINGLE_PROCESS,
    report: Callable[[str], None] = lambda _: None,
) -> FittedHead:
    """Fit on features (N, D) and codes (N,) in 0..K-1; no feature counts for or against a class without samples.

    The processes of `world` share the work; each of them can read all features. `report` is called with a line on
    what is being fitted.
    """
    present, labels = np.unique(codes, return_inverse=True)
    rows = Rows(features, columns=len(present), world=world)
    far = rows.bound()
    fitted = _fit_present(rows, labels, len(present), seed, tolerance, report)
    fitted = replace(fitted, result=replace(fitted.result, far=far))
    if len(present) == num_classes:
        return fitted
    weight, bias = np.zeros((num_classes, features.shape[1])), np.zeros(num_classes)
    weight[present], bias[present] = fitted.weight, fitted.bias
    return replace(fitted, weight=weight, bias=bias)


def _fit_present(
    rows: Rows, labels: np.ndarray, num_classes: int, seed: int, tolerance: float, report: Callable[[str], None]
) -> FittedHead:
    """The same for classes that have samples."""
    began, targets = time.perf_counter(), torch.from_numpy(labels)
    counts, copies = np.bincount(labels, minlength=num_classes), rows.copies(labels)
    held = _folds(labels, copies, seed)
    most = MOST_SCORES // num_classes
    folds = [Fold(rows, targets, num_classes, _some(fold, copies, most, seed), report) for fold in held if len(fold)]
    whole = Fold(rows, targets, num_classes, np.empty(0, dtype=np.int64), report, keeps_moments=False)
    choice, evidence, start, passes, scale = USUAL, None, None, 0, USUAL_SCALE
    natural = balanced = prior_check = set_scores = None
    if folds:
        choice, passes, done, start = _choose(folds, counts, copies, seed, tolerance)
        scored = _enough(folds, max(min(HELD_FOR_SCALE, most), sum(map(len, done))))
        for fold in scored[len(done) :]:
            fold.keeps_moments = False
            head = _solve(fold, choice, None, tolerance)  # from nothing, so that no sample leaks in
            done.append(fold.evidence(choice.metric, head))
            fold.forget()
            start = start or head
        evidence = replace(evidence_of(scored, done, counts), copies=copies[np.concatenate([f.held for f in scored])])
        scale = evidence.best_scale(rows.world)[0]
        natural, balanced = scores_of(evidence, scale, len(scored), len(held))
        prior_check, set_scores = tried_on(evidence, scale)
    weight, bias, centre = _whole_head(whole, choice, start, tolerance)
    result = ProbeResult(
        ridge=choice.ridge_for(len(labels)),
        power=choice.power,
        shrinkage=choice.metric.shrinkage,
        scaled=choice.metric.scaled,
        scale=scale,
        folds=len(folds),
        held_out=0 if evidence is None else len(evidence.labels),
        passes=passes + whole.passes + sum(fold.passes for fold in folds),
        converged=whole.converged,
        seconds=time.perf_counter() - began,
        natural=natural,
        balanced=balanced,
        prior_check=prior_check,
        set_scores=set_scores,
        copies=len(labels) - len(np.unique(copies)),
    )
    return FittedHead(scale * weight, scale * bias, centre, result)


def _choose(
    folds: list[Fold], counts: np.ndarray, copies: np.ndarray, seed: int, tolerance: float
) -> tuple[Choice, int, list[Tensor], Start | None]:
    """The choice; if it was made on a subsample, its passes; else the first folds' evidence (M, K) and a head."""
    rows, labels = folds[0].rows, folds[0].labels.numpy()
    chosen = subsample(labels, rows.width, len(counts), seed)
    if chosen is None:
        best = choose_ridge(_enough(folds, HELD_FOR_CHOICE), counts, tolerance)
        for fold in folds:
            fold.forget()
        return best.choice, 0, best.evidence, best.heads[0]
    _, codes, sizes = np.unique(labels[chosen], return_inverse=True, return_counts=True)
    fewer, targets = Rows(rows.features, chosen, len(sizes), rows.world), torch.from_numpy(codes)
    held = _folds(codes, copies[chosen], seed)
    smaller = _enough([Fold(fewer, targets, len(sizes), fold, folds[0].report) for fold in held], HELD_FOR_CHOICE)
    return choose_ridge(smaller, sizes, tolerance).choice, sum(fold.passes for fold in smaller), [], None


def _folds(labels: np.ndarray, copies: np.ndarray, seed: int) -> list[np.ndarray]:
    """Rows that each fold leaves out: stratified, with all copies of a sample, never all samples of a class."""
    _, first, sample = np.unique(copies, return_index=True, return_inverse=True)
    own = labels[first]
    folds = stratified_folds(own, number_of_folds(np.bincount(own)), seed, keep_single=True)
    return [np.flatnonzero(np.isin(sample, fold)) for fold in folds]


def _some(held: np.ndarray, copies: np.ndarray, most: int, seed: int) -> np.ndarray:
    """At most so many of the rows that a fold holds out, in rising order; it is fitted on the others too."""
    if len(held) <= most:
        return held
    order = np.random.default_rng(seed).permutation(copies.max() + 1)[copies[held]]  # copies follow one another
    return np.sort(held[np.argsort(order, kind="stable")[:most]])


def _enough(folds: list[Fold], samples: int) -> list[Fold]:
    """The first folds that together hold out so many samples, or all."""
    sizes = np.cumsum([len(fold.held) for fold in folds])
    return folds[: int(np.searchsorted(sizes, samples)) + 1]


def _solve(fold: Fold, choice: Choice, start: Start | None, tolerance: float) -> Start:
    """The head of a fold; from nothing, roughly for a larger ridge first."""
    if start is None:
        easier = replace(choice, ridge=EASIER * choice.ridge)
        start = fold.solve(easier, None, EASIER * tolerance)
    return fold.solve(choice, start, tolerance)


def _whole_head(
    whole: Fold, choice: Choice, start: Start | None, tolerance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight (K, D), bias (K,) without the prior, and centre (D,) of a head on all samples, float64."""
    head = _solve(whole, choice, start, tolerance)
    problem = whole.problem(choice.metric)
    bias = head.bias.double() - problem.prior.double().log()
    return head.weight.double().numpy(), bias.numpy(), problem.system.centre.double().numpy()
