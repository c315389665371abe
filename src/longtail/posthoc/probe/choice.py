"""Metric and ridge chosen by the likelihood of samples that heads have not seen.

For each metric the ridge falls in steps of sqrt(10), each head solved from the one before, until the loss of the
held-out samples rises; other metrics start from the best head so far. The ridge of class k is

    ridge (n_k / mean n)^power

with a power of 1/2, and then, from the best head, of 0: one ridge for all classes may press the vectors of small
classes to 0, or be what few samples need; held-out samples decide. What counts is ridge x samples, the precision
of a Gaussian prior on the class vectors: it is the same for a subsample, a fold and all samples. Large data are chosen
on fewer held-out samples, very large data on a subsample of classes and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longtail.posthoc.probe.inputs import Rows
from longtail.posthoc.probe.metric import Coordinates, Metric, Statistics, statistics
from longtail.posthoc.probe.result import Evidence
from longtail.posthoc.probe.ridge_head import Head, RidgeProblem

METRICS = (Metric(0.5), Metric(1.0), Metric(0.1), Metric(0.5, scaled=True))
RIDGES = tuple(10 ** (0.5 - step / 2) for step in range(17))  # 3.2 down to 3e-8, times the samples of the fit
FIRST = 3  # 0.1
POWERS = (0.5, 0.0)
PATIENCE = 2  # ridges in a row that are no better, before a search from nothing ends
HELD_FOR_CHOICE = 4_000  # held-out samples are enough to choose by
WORK_FOR_CHOICE = 1 << 33  # samples x features x classes of the fits that choose
FEWEST_CLASSES, FEWEST_ROWS = 100, 10


@dataclass(frozen=True)
class Choice:
    """A metric, a ridge for so many samples, and the power of class sizes in it."""

    metric: Metric
    ridge: float
    samples: int
    power: float = POWERS[0]

    def ridge_for(self, samples: float) -> float:
        """The ridge of a class of average size, among so many samples."""
        return self.ridge * self.samples / samples

    def ridges(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """(K, 1) of classes with these counts (K,)."""
        return (self.ridge_for(float(counts.sum())) * (counts / counts.mean()).pow(self.power)).to(dtype).unsqueeze(1)


USUAL = Choice(Metric(1.0), 0.03, 1000)  # where every class has one sample, and nothing can be held out


@dataclass(frozen=True)
class Start:
    """A head on centred features: weight (K, D), bias (K,), and mean p (1 - p) of each class (K,)."""

    weight: Tensor
    bias: Tensor
    spread: Tensor


@dataclass
class Fold:
    """Samples that are left out, and heads fitted on the others.

    Args:
        rows: features of all samples.
        labels: (N,) int64, 0..K-1.
        num_classes: K.
        held: (M,) rows that are left out.
        report: called with a line on what is being fitted.
        keeps_moments: for other metrics; otherwise their memory is freed.
    """

    rows: Rows
    labels: Tensor
    num_classes: int
    held: np.ndarray
    report: Callable[[str], None] = lambda _: None
    keeps_moments: bool = True
    passes: int = 0
    converged: bool = True
    _moments: Statistics | None = field(default=None, repr=False)
    _problem: RidgeProblem | None = field(default=None, repr=False)
    _metric: Metric | None = None

    @property
    def held_labels(self) -> Tensor:
        return self.labels[self.held]

    def problem(self, metric: Metric) -> RidgeProblem:
        """The objective on the samples that are kept; the last metric's is remembered."""
        if self._problem is None or self._metric != metric:
            kept = np.setdiff1d(np.arange(len(self.labels)), self.held, assume_unique=True)
            rows, labels = self.rows.only(kept), self.labels[kept]
            moments = self._moments or statistics(rows, labels, self.num_classes)
            system = Coordinates(moments, metric, rows.dtype, rows.world)
            self._moments = moments if self.keeps_moments else None
            self._problem, self._metric = RidgeProblem(rows, labels, self.num_classes, system), metric
        return self._problem

    def solve(self, choice: Choice, start: Start | None, tolerance: float) -> Start:
        """The head of the samples that are kept, from a head nearby or from the prior."""
        problem = self.problem(choice.metric)
        self.report(f"fitting a head with ridge {choice.ridge:.3g} on {len(problem.labels):,} samples")
        before = problem.passes
        ridge = choice.ridges(problem.counts, self.rows.dtype)
        if start is None:
            head = Head.start(problem.prior, len(problem.system.curvature))
        else:
            head = Head(problem.system.of_weight(start.weight), start.bias, start.spread)
        head = problem.solve(head, ridge, tolerance)
        self.passes += problem.passes - before
        self.converged = problem.converged
        return Start(problem.system.weight(head.coordinates), head.bias, head.spread)

    def evidence(self, metric: Metric, head: Start) -> Tensor:
        """Scores (M, K) of the samples left out, without the training prior."""
        problem = self.problem(metric)
        return self.rows.only(self.held).scores(head.weight, head.bias, problem.system.centre) - problem.prior.log()

    def forget(self) -> None:
        """Free the memory of moments and coordinates."""
        self._moments = self._problem = None


def evidence_of(folds: list[Fold], scores: list[Tensor], counts: np.ndarray) -> Evidence:
    """The evidence of the samples that folds left out, together."""
    return Evidence(torch.cat(scores), torch.cat([fold.held_labels for fold in folds]), counts)


@dataclass
class Trial:
    """A metric and a ridge, the loss of held-out samples, and each fold's evidence (M, K) and head on features."""

    choice: Choice
    loss: float
    evidence: list[Tensor]
    heads: list[Start]


def choose_ridge(folds: list[Fold], counts: np.ndarray, tolerance: float) -> Trial:
    """The best metric, ridge and power for folds."""
    best: Trial | None = None
    for metric in METRICS:
        if best is None or metric.scaled:  # other units need another ridge: a search of its own
            found = _search(folds, counts, metric, POWERS[0], FIRST, None, tolerance)
        else:
            found = _search(folds, counts, metric, POWERS[0], RIDGES.index(best.choice.ridge), best.heads, tolerance)
        best = found if best is None or found.loss < best.loss else best
    assert best is not None
    for power in POWERS[1:]:
        known = best.choice
        found = _search(folds, counts, known.metric, power, RIDGES.index(known.ridge), best.heads, tolerance)
        best = found if found.loss < best.loss else best
    return best


def _search(
    folds: list[Fold],
    counts: np.ndarray,
    metric: Metric,
    power: float,
    first: int,
    start: list[Start] | None,
    tolerance: float,
) -> Trial:
    """The best ridge of a metric and a power: falling from the first one, or rising if that is worse."""
    patience = PATIENCE if start is None else 1

    def trial(step: int, near: Sequence[Start | None]) -> Trial:
        return _trial(folds, counts, Choice(metric, RIDGES[step], len(folds[0].labels), power), near, tolerance)

    best = origin = trial(first, start or [None] * len(folds))
    for way in (1, -1):
        last, rises, step = origin, 0, first + way
        while 0 <= step < len(RIDGES) and rises < patience:
            last = trial(step, last.heads)
            rises = 0 if last.loss < best.loss else rises + 1
            best = last if last.loss < best.loss else best
            step += way
        if best is not origin:
            break
    return best


def _trial(
    folds: list[Fold], counts: np.ndarray, choice: Choice, start: Sequence[Start | None], tolerance: float
) -> Trial:
    heads, evidence = [], []
    for fold, near in zip(folds, start, strict=True):
        heads.append(fold.solve(choice, near, tolerance))
        evidence.append(fold.evidence(choice.metric, heads[-1]))
    return Trial(choice, evidence_of(folds, evidence, counts).best_scale(folds[0].rows.world)[1], evidence, heads)


def subsample(labels: np.ndarray, width: int, num_classes: int, seed: int) -> np.ndarray | None:
    """Rows of a smaller problem with a similar tail, or None if all of them are not too many."""
    share = WORK_FOR_CHOICE / (len(labels) * width * num_classes)
    if share >= 1:
        return None
    counts = np.bincount(labels, minlength=num_classes)
    several = np.argsort(-counts, kind="stable")[: (counts > 1).sum()]
    number = min(max(round(np.sqrt(share) * num_classes), FEWEST_CLASSES), len(several))
    classes = several[np.linspace(0, len(several) - 1, number).round().astype(int)]
    share /= (number / num_classes) * (counts[classes].sum() / len(labels))
    rng = np.random.default_rng(seed)
    rows = []
    for label in classes:
        own = np.flatnonzero(labels == label)
        rows.append(rng.permutation(own)[: max(round(min(share, 1.0) * len(own)), min(len(own), FEWEST_ROWS))])
    return np.sort(np.concatenate(rows))
