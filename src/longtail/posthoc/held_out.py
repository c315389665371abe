"""What methods share that are fitted or chosen on held-out samples: a check, sample weights, the likelihood."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from longtail.errors import UserError
from longtail.outputs.rows import LogitRows

if TYPE_CHECKING:
    from longtail.posthoc.inputs import FitData

DUPLICATES = 0.1  # share of the held-out rows that may equal training rows: duplicates within a data set
TEMPERATURES = (0.05, 20.0)
USUAL_SPREAD = (0.1, 100.0)  # standard deviation of the logits of a sample

HOW_TO_HOLD_OUT = (
    "hold out a part of the training images (longtail train --validation 0.1; or --validation 0.02 --validation-from "
    "head, which costs the tail nothing), pass held-out outputs (validation=, --validation FILE), or, if the backbone "
    'was never trained on these images, HALO(held_out="cross-fit") (--method halo --options held-out cross-fit)'
)


def require_unseen(train: FitData, held_out: FitData) -> None:
    """Refuse held-out samples whose rows (logits, and features where both have them) are training rows."""
    with_features = train.features is not None and held_out.features is not None
    if train.features is not None and held_out.features is not None:
        widths = train.features.shape[1], held_out.features.shape[1]
        if widths[0] != widths[1]:
            raise UserError(f"training outputs have {widths[0]} features per sample, held-out outputs {widths[1]}")
    train_rows = Counter(_digests(train, with_features=with_features))
    held_out_rows = _digests(held_out, with_features=with_features)
    shared, size = sum(digest in train_rows for digest in held_out_rows), len(held_out_rows)
    # Rows with few digits (two classes, one decimal) are often equal by chance, then within the training set, too.
    by_chance = sum(number for number in train_rows.values() if number > 1) / train_rows.total()
    if shared == size or shared > max(_allowed(train, held_out) + by_chance * size, 1):
        raise UserError(
            f"{shared} of {size} held-out samples are training samples too (their rows are equal); "
            "a fit on samples that the network has seen would be overconfident; pass other held-out samples"
        )


def _allowed(train: FitData, held_out: FitData) -> float:
    """How many held-out rows may equal training rows by chance; fewer if the training outputs are a subsample."""
    share = np.minimum(train.seen_counts / np.maximum(train.class_counts, 1), 1)[held_out.labels.numpy()]
    return float(DUPLICATES * share.sum() + 3 * np.sqrt(DUPLICATES * (share * (1 - share)).sum()))


def _digests(data: FitData, *, with_features: bool) -> list[bytes]:
    """One digest per row (N,) of the logits, and of the features if asked for."""
    features = LogitRows(data.features) if with_features else None
    digests: list[bytes] = []
    for where, chunk in data.rows.stored.chunks():
        arrays = [chunk] if features is None else [chunk, features.read(where)]
        rows = zip(*(np.ascontiguousarray(array.numpy()) for array in arrays), strict=True)
        digests += [
            hashlib.blake2b(b"".join(values.tobytes() for values in row), digest_size=16).digest() for row in rows
        ]
    return digests


def sample_weights(labels: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """(M,) weights of held-out samples, summing to their effective number.

    They make the fit a posterior at the prior pi^(1/2), half-way between the training set and balance: w is
    proportional to n^(1/2) / m with m the held-out samples per class.
    """
    held_out_counts = np.bincount(labels, minlength=len(class_counts))
    return to_effective_number((np.sqrt(class_counts) / np.maximum(held_out_counts, 1))[labels])


def to_effective_number(weights: np.ndarray) -> np.ndarray:
    """(M,) weights scaled to sum to their effective sample size.

    >>> to_effective_number(np.array([2.0, 2.0])).tolist()
    [1.0, 1.0]
    """
    return np.asarray(weights * (weights.sum() / np.square(weights).sum()))


def like_training(held_out_counts: np.ndarray, class_counts: np.ndarray) -> bool:
    """Whether counts look like a draw from training images: no class is off by more than chance and rounding.

    >>> counts = np.array([200, 80, 5])
    >>> like_training(np.array([20, 8, 1]), counts), like_training(np.full(3, 9), counts)
    (True, False)
    """
    present = held_out_counts > 0
    expected = class_counts[present] * held_out_counts.sum() / class_counts[present].sum()
    # A split that leaves every class at least one image is off by up to one image per class.
    off = np.maximum(np.abs(held_out_counts[present] - expected) - 1, 0)
    return bool((np.square(off) / expected).sum() <= 3 * present.sum())


def log_likelihood(scores: Tensor, codes: Tensor, offset: Tensor, scale: float) -> Tensor:
    """(B,) log-likelihood of scores (B, K) times a scale, at the prior of the offset (K,)."""
    return (scale * scores + offset).log_softmax(1).gather(1, codes.unsqueeze(1)).squeeze(1)


def best_scale(scores: Tensor, codes: Tensor, offset: Tensor, weights: np.ndarray) -> float:
    """The inverse temperature of greatest likelihood; its bounds are relative to the spread of unusual logits."""
    weight = torch.from_numpy(weights)
    spread = float((scores - scores.mean(1, keepdim=True)).double().std(correction=0))
    size = 1.0 if spread == 0 or USUAL_SPREAD[0] <= spread <= USUAL_SPREAD[1] else spread

    def loss(log_scale: float) -> float:
        return -float(weight @ log_likelihood(scores, codes, offset, float(np.exp(log_scale))))

    cold, hot = (size * temperature for temperature in TEMPERATURES)
    solved = minimize_scalar(loss, bounds=(-np.log(hot), -np.log(cold)), method="bounded", options={"xatol": 1e-3})
    return float(np.exp(solved.x))
