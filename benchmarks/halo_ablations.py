"""What each part of HALO brings: without each head, with fewer or other held-out images, with other prior widths."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import halo_cases
import numpy as np
from halo_cases import Case

from longtail import HALO, Outputs
from longtail.metrics.intervals import over_seeds
from longtail.metrics.scores import evaluate
from longtail.posthoc.halo import mixture
from longtail.posthoc.inputs import from_outputs

Table = tuple[str, str, list[dict[str, object]], str]


def ablation_tables(draws: int, folders: list[Path]) -> Iterator[Table]:
    """Part of the file name, title, rows and notes of each table."""
    sources = {"features": ("a ResNet-32 for CIFAR-10-LT 100", halo_cases.shared_features(draws))}
    sources["digits"] = ("long-tailed digits", halo_cases.digits(draws))
    if folders:
        sources["runs"] = ("trained networks", halo_cases.runs(folders, os.environ.get("LONGTAIL_ROOT")))
    for part, (title, cases) in sources.items():
        found: dict[str, list[float]] = {}
        held = 0
        for seen, validation, test in cases:
            assert validation is not None
            held = len(validation)
            for name, halo in variants((seen, validation, test)):
                scored = evaluate(np.asarray(halo.transform(test)), test.labels, test.counts_for_groups)
                found.setdefault(name, []).append(100 * scored.balanced)
        whole = found["HALO"]
        rows: list[dict[str, object]] = []
        for name, own in found.items():
            gain = over_seeds([one - other for one, other in zip(own, whole, strict=True)])
            bounds = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
            row = {"HALO": name, "balanced": f"{np.mean(own):.2f}", "minus HALO": f"{gain.value:+.2f}{bounds}"}
            rows.append(dict(row))
        notes = (
            f"{len(whole)} draws or seeds, about {held} held-out images; every row changes one thing. Balanced "
            "accuracy, per cent; intervals over draws or seeds, from three on."
        )
        yield part, f"What each part of HALO brings: {title}", rows, notes


def variants(case: Case) -> Iterator[tuple[str, HALO]]:
    """HALO as it is, and changed in one thing each."""
    seen, validation, _ = case
    assert validation is not None
    train, held = from_outputs(seen), from_outputs(validation, need_every_class=False)
    halo = HALO().fit(seen, validation=validation)
    yield "HALO", halo
    for left_out in (("lda",), ("balanced",), ("lda", "balanced")):
        fewer = copy.copy(halo)
        fewer.heads_ = {name: head for name, head in halo.heads_.items() if name not in left_out}
        yield f"without {' and '.join(left_out)}", fewer.refitted(train, held)
    plain = copy.copy(halo)
    plain.log_norms_ = np.zeros_like(halo.log_norms_)
    yield "without norms", plain.refitted(train, held)
    for factor in (0.5, 2.0, 10.0):
        widths = {name: replace(prior, deviation=factor * prior.deviation) for name, prior in mixture.PRIORS.items()}
        with mock.patch.dict(mixture.PRIORS, widths):
            yield f"priors {factor:g} times as wide", halo.refitted(train, held)
    for name, chosen in held_out_sets(validation).items():
        yield name, halo.refitted(train, held.subset(chosen))


def held_out_sets(validation: Outputs) -> dict[str, np.ndarray]:
    """Rows of smaller and of other held-out sets."""
    rng = np.random.default_rng(0)
    labels, counts = validation.labels, validation.class_counts
    own = [rng.permutation(np.flatnonzero(labels == c)) for c in range(len(counts))]
    larger = np.argsort(-counts, kind="stable")[: (len(counts) + 1) // 2]
    fewest = max(min((len(rows) for rows in own if len(rows)), default=1), 1)
    return {
        "a fifth of the held-out images": np.concatenate([rows[: -(-len(rows) // 5)] for rows in own]),
        "held-out images of the larger half of the classes": np.concatenate([own[c] for c in larger]),
        "equally many held-out images of every class": np.concatenate([rows[:fewest] for rows in own]),
    }
