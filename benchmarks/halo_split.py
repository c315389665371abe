"""The price of the split: HALO on networks that spare images for it beside MARC on networks that had them all."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import halo_cases
import numpy as np
from common import cifar_root
from systems import BUDGETS, config_of

from longtail import HALO, MARC, Outputs, train
from longtail.metrics.intervals import over_seeds
from longtail.metrics.scores import evaluate
from longtail.posthoc.base import PostHoc
from longtail.runs.folder import Run
from longtail.runs.record import MODEL_FILE, RUN_FILE

# Share of the training images that is held out, and of which classes.
SHARES = {
    "90 %": (0.1, "every"),
    "98 %": (0.02, "every"),
    "98 %, of larger classes": (0.02, "head"),
    "100 %": (0.0, "every"),
}


def split_rows(seeds: int) -> list[dict[str, object]]:
    """Balanced accuracy per share and method, and the difference from MARC on the whole set, seed by seed."""
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(seeds):
        for share in SHARES:
            run = Run.open(trained(share, seed))
            seen, test = run.outputs("train", views=1), run.outputs("test")
            methods: dict[str, PostHoc] = {"MARC": MARC().fit(seen)}
            if SHARES[share][0]:
                methods["HALO"] = HALO().fit(seen, validation=run.outputs("validation"))
            for name, method in methods.items():
                found.setdefault((share, name), []).append(balanced(method, test))
                print(f"seed {seed}, {share}: {name} {found[share, name][-1]:.2f}", file=sys.stderr, flush=True)
    whole = found["100 %", "MARC"]
    rows: list[dict[str, object]] = []
    for (share, name), own in found.items():
        gain = over_seeds([one - other for one, other in zip(own, whole, strict=True)])
        bounds = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
        scores = {"balanced": f"{np.mean(own):.2f}", "minus MARC on 100 %": f"{gain.value:+.2f}{bounds}"}
        rows.append({"trained on": share, "method": name, **scores})
    return rows


def trained(share: str, seed: int) -> Path:
    """The finished run of a share and a seed: opened, resumed or trained."""
    held, classes = SHARES[share]
    folder = halo_cases.KEPT / "split" / f"{100 - 100 * held:g}-{classes}-seed{seed}"
    if not (folder / MODEL_FILE).is_file():
        root = os.environ.get("LONGTAIL_ROOT") or str(cifar_root("cifar10"))
        config = replace(
            config_of("cifar10-lt-100", BUDGETS["resnet8"], root), validation=held, validation_from=classes, seed=seed
        )
        train(config, folder, resume=(folder / RUN_FILE).is_file(), progress=False)
    return folder


def balanced(method: PostHoc, test: Outputs) -> float:
    logits = np.asarray(method.transform(test))
    return 100 * evaluate(logits, test.labels, test.counts_for_groups).balanced
