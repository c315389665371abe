"""Arrays at the edge of what can be computed with, and estimators fitted on them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

FAST = ("tau-norm", "logit-adjustment")  # on thousands of classes
NAMES = ("marc", "lws", "crt", "disalign", "temperature", "vector", "platt", *FAST) * 5 + ("halo",)
# Passes over the data are bounded: whether numbers stay finite shows in the first ones.
BOUNDED = {name: {"max_iter": "40"} for name in ("marc", "lws", "crt", "vector", "platt")} | {
    "disalign": {"max_iter": "8"}
}


def attempt_estimator(rng: random.Random) -> str:
    """Fit one method on one set of arrays and use it; returns what it was and how it ended."""
    from longtail.methods import build_posthoc

    draw = np.random.default_rng(rng.getrandbits(64))
    classes = _classes(rng)
    name = rng.choice(FAST if classes > 100 else NAMES)
    size = classes * rng.choice((1, 2, 3)) + rng.randrange(4) if classes <= 100 else classes
    labels = np.concatenate([np.arange(classes), draw.integers(0, classes, size - classes)])
    logits = _logits(rng, draw, labels, classes)
    known = _known(rng, draw, classes)
    if name in ("crt", "halo", "disalign") or rng.random() < 0.1:
        known["features"] = draw.normal(size=(size, rng.randrange(1, 4))) * rng.choice((1e-30, 1, 1, 1e10, 1e30))
    if name in ("halo",) or rng.random() < 0.3:
        known["validation"] = (_logits(rng, draw, labels, classes), labels)
        known["validation"] += (draw.normal(size=known["features"].shape),) if "features" in known else ()
    return f"{name}: {_fit(build_posthoc(name, BOUNDED.get(name, {})), logits, labels, known)}"


def _fit(method: Any, logits: np.ndarray, labels: np.ndarray, known: dict[str, Any]) -> str:
    from longtail.errors import UserError

    try:
        method.fit(logits, labels, **known)
        found = method.transform(logits, known.get("features"))
        if method.result_.converged and not np.isfinite(np.asarray(found)).all():
            return "FINDING: converged, and its logits are not finite"
        probabilities = np.asarray(method.predict_proba(logits, known.get("features")))
        if method.result_.converged and not np.isfinite(probabilities).all():
            return "FINDING: converged, and its probabilities are not finite"
    except UserError as error:
        return "refused" if str(error) else "FINDING: no message"
    except (TypeError, ValueError) as error:
        return f"error {error}" if str(error) else "FINDING: no message"
    return "answered"


def _classes(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.95:
        return rng.randrange(2, 7)
    return rng.randrange(7, 60) if kind < 0.9995 else round(10 ** rng.uniform(2.1, 3.7))


def _logits(rng: random.Random, draw: np.random.Generator, labels: np.ndarray, classes: int) -> np.ndarray:
    size = 10.0 ** rng.choice((-30, -3, 0, 0, 0, 1, 3, 10, 30))
    logits = draw.normal(size=(len(labels), classes)) * size
    match rng.randrange(8):
        case 0:  # separable
            logits = np.eye(classes)[labels] * size
        case 1:  # constant
            logits = np.full_like(logits, rng.choice((0.0, 1.0, size)))
        case 2:  # two classes with equal logits
            logits[:, 1] = logits[:, 0]
        case 3:  # one class far above
            logits[:, 0] += 1e6 * size
        case 4:  # always wrong
            logits = -np.eye(classes)[labels] * size
        case 5 if rng.random() < 0.3:
            logits[rng.randrange(len(labels)), 0] = rng.choice((np.nan, np.inf, -np.inf))
    return logits.astype(rng.choice((np.float32, np.float64, np.float64))) if size < 1e30 else logits


def _known(rng: random.Random, draw: np.random.Generator, classes: int) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if rng.random() < 0.7:
        known["class_counts"] = np.floor(10 ** draw.uniform(0, rng.choice((0.1, 3, 7)), classes)).astype(np.int64)
    if rng.random() < 0.5:
        known["weight_norms"] = 10 ** draw.uniform(-1, 1, classes) * rng.choice((1e-30, 1, 1, 1, 1e30))
    if rng.random() < 0.3:
        known["head_bias"] = draw.normal(size=classes) * rng.choice((1, 1e30))
    return known
