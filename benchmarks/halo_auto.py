"""What choosing costs: balanced accuracy that rules of `auto` lose to the best of the methods they choose from.

Every model is tried once; each rule then chooses from the same table. Simulated models have classes around means,
a head that knows the means up to noise, and more or less of the training prior in their logits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import halo_cases
import numpy as np
import torch
from halo_cases import Case

from longtail import Outputs
from longtail.metrics.intervals import over_seeds
from longtail.metrics.scores import evaluate
from longtail.posthoc.auto import Candidate, Trial, try_candidates
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.priors import shifted

NUMBER = int(os.environ.get("LONGTAIL_MODELS", 40))  # simulated models of each kind
Rule = Callable[[Trial], Candidate]


def within(errors: float, sure: float = 2.0) -> Rule:
    """The simplest within some standard errors of the best, of those surely better than the unchanged model."""

    def choose(trial: Trial) -> Candidate:
        as_it_is = trial.candidates[0]
        better = [other for other in trial.candidates[1:] if _gain(trial, other, as_it_is) > sure]
        best = max(better, key=trial.mean, default=as_it_is)
        return next((other for other in better if _gain(trial, best, other) <= errors), as_it_is)

    return choose


def _gain(trial: Trial, first: Candidate, second: Candidate) -> float:
    """A difference in standard errors."""
    if first is second:
        return 0.0
    mean, error = trial.difference(first, second)
    return mean / max(error, 1e-12)


def named(name: str) -> Rule:
    return lambda trial: next((one for one in trial.candidates if one.name == name), trial.candidates[0])


RULES: dict[str, Rule] = {
    "auto: simplest within 1 error": lambda trial: trial.chosen,
    "simplest within 0.5 errors": within(0.5),
    "highest likelihood": within(0.0),
    "highest likelihood, better by 1 error": within(0.0, 1.0),
    "simplest within 1 error, better by 1": within(1.0, 1.0),
    "unchanged": named("softmax"),
    "logit adjustment always": named("logit-adjustment"),
    "MARC always": named("marc"),
    "HALO always": named("halo"),
}


def simulated(kind: str, held_out: int) -> Iterator[Case]:
    """Models whose logits have all, half or nothing of the training prior."""
    share = {"biased": 1.0, "half balanced": 0.5, "balanced": 0.0}[kind]
    for seed in range(NUMBER):
        rng = np.random.default_rng(seed)
        classes, width = int(rng.choice([5, 10, 20])), 16
        counts = np.maximum((1000 * rng.uniform(20, 100) ** -np.linspace(0, 1, classes)).round(), 5).astype(np.int64)
        means = rng.uniform(0.4, 0.7) * rng.normal(size=(classes, width))
        weight = (means + rng.uniform(0, 0.25) * rng.normal(size=means.shape)).astype(np.float32)
        bias = (share * np.log(counts / counts.sum()) - 0.5 * np.square(means).sum(1)).astype(np.float32)
        small = np.maximum((counts * held_out / counts.sum()).round(), 1).astype(np.int64)
        parts = []
        for split, sizes in (("train", counts), ("validation", small), ("test", np.full(classes, 400))):
            labels = np.repeat(np.arange(classes), sizes)
            inputs = (means[labels] + rng.normal(size=(len(labels), width))).astype(np.float32)
            logits = inputs @ weight.T + bias
            head = {"head_weight": weight, "head_bias": bias}
            parts.append(Outputs(labels, counts, logits=logits, features=inputs, split=split, **head))
        yield parts[0], parts[1], parts[2]


def sources(draws: int) -> Iterator[tuple[str, Iterator[Case]]]:
    for kind in ("biased", "half balanced", "balanced"):
        for held_out in (40, 200, 1000):
            yield f"{kind}, {held_out} held out", simulated(kind, held_out)
    yield "digits", halo_cases.digits(draws)
    yield "ResNet-32, stored features", halo_cases.shared_features(draws)


def auto_rows(draws: int) -> list[dict[str, object]]:
    """One row per kind of model: points that each rule loses to the best candidate, in the mean."""
    rows: list[dict[str, object]] = []
    for title, cases in sources(draws):
        lost: dict[str, list[float]] = {}
        for seen, held, test in cases:
            assert held is not None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = try_candidates(from_outputs(seen), from_outputs(held, need_every_class=False), "uniform")
            points = {one.name: _balanced(one, test) for one in trial.candidates}
            for rule, choose in RULES.items():
                lost.setdefault(rule, []).append(max(points.values()) - points[choose(trial).name])
        shown = {rule: over_seeds(own) for rule, own in lost.items()}
        number = len(next(iter(lost.values())))
        rows.append({"models": f"{title} ({number})", **{rule: f"{gap.value:.2f}" for rule, gap in shown.items()}})
        print(rows[-1], flush=True)
    mean = {rule: f"{np.mean([float(str(row[rule])) for row in rows]):.2f}" for rule in RULES}
    worst = {rule: f"{max(float(str(row[rule])) for row in rows):.2f}" for rule in RULES}
    return [*rows, {"models": "mean of the rows", **mean}, {"models": "worst row", **worst}]


def _balanced(candidate: Candidate, test: Outputs) -> float:
    logits = shifted(torch.from_numpy(np.asarray(candidate.method.transform(test))), candidate.target_shift).numpy()
    return 100 * evaluate(logits, test.labels, test.counts_for_groups).balanced
