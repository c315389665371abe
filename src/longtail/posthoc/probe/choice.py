"""Metric and ridge chosen by the likelihood of samples that heads have not seen.

For a metric the ridge falls and rises in steps of sqrt(10), each head solved from the one before, until the loss of the
held-out samples grows; with fewer samples than features it can have two minima. Other metrics start from the best head
so far. The ridge of class k is

    ridge (n_k / mean n)^power

with a power of 1/2, and then of 0: one ridge for all classes may press the vectors of small
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
RIDGES = tuple(10 ** (1.5 - step / 2) for step in range(19))  # 32 down to 3e-8, times the samples of the fit
FIRST = 5  # 0.1
POWERS = (0.5, 0.0)
SEPARATED = 0.01  # mean p (1 - p) of a head on its own samples, relative to that of the prior
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


USUAL = Choice(Metric(1.0), 0.01, 1000)  # where every class has one sample, and nothing can be held out


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
    held = np.concatenate([fold.held for fold in folds])
    return Evidence(torch.cat(scores), folds[0].labels[held], counts)


@dataclass
class Trial:
    """A metric and a ridge, the loss of held-out samples, and each fold's evidence (M, K) and head on features."""

    choice: Choice
    loss: float
    evidence: list[Tensor]
    heads: list[Start]

    def separates(self, counts: np.ndarray) -> bool:
        """Whether a head has almost no doubt about its own samples: smaller ridges are slow, and change its length."""
        prior = counts / counts.sum()
        return float(self.heads[0].spread.sum()) < SEPARATED * float((prior * (1 - prior)).sum())


def choose_ridge(folds: list[Fold], counts: np.ndarray, tolerance: float) -> Trial:
    """The best metric, ridge and power for folds."""
    best: Trial | None = None
    for metric in METRICS:  # other units need another ridge: a search of its own
        found = _search(folds, counts, metric, POWERS[0], tolerance, None if metric.scaled else best)
        best = found if best is None or found.loss < best.loss else best
    assert best is not None
    for power in POWERS[1:]:
        found = _search(folds, counts, best.choice.metric, power, tolerance)
        best = found if found.loss < best.loss else best
    return best


def _search(
    folds: list[Fold], counts: np.ndarray, metric: Metric, power: float, tolerance: float, near: Trial | None = None
) -> Trial:
    """The best ridge of a metric and a power, below and above a first one; or near that of a trial, if it is given."""
    first = RIDGES.index(near.choice.ridge) if near else FIRST

    def trial(step: int, start: Sequence[Start | None]) -> Trial:
        return _trial(folds, counts, Choice(metric, RIDGES[step], len(folds[0].labels), power), start, tolerance)

    patience = 1 if near else PATIENCE
    best = origin = trial(first, near.heads if near else [None] * len(folds))
    for way in (1, -1):
        side, last, rises, step = origin, origin, 0, first + way
        while 0 <= step < len(RIDGES) and rises < patience and not (way > 0 and last.separates(counts)):
            last = trial(step, last.heads)
            rises = 0 if last.loss < side.loss else rises + 1
            side = last if last.loss < side.loss else side
            step += way
        best = side if side.loss < best.loss else best
        if near and best is not origin:
            break
    return best


def _trial(
    folds: list[Fold], counts: np.ndarray, choice: Choice, start: Sequence[Start | None], tolerance: float
) -> Trial:
    heads, evidence = [], []
    for fold, near in zip(folds, start, strict=True):
        heads.append(fold.solve(choice, near, tolerance))
        evidence.append(fold.evidence(choice.metric, heads[-1]))
    unseen = evidence_of(folds, evidence, counts)
    unusual = np.log10(choice.ridge_for(1) / USUAL.ridge_for(1)) ** 2 / 2  # has the weight of one sample
    loss = unseen.best_scale(folds[0].rows.world)[1] + unseen.several().one_sample * unusual
    return Trial(choice, loss, evidence, heads)


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
