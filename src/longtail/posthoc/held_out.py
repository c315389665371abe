"""What methods share that are fitted or chosen on held-out samples: a check, sample weights, the likelihood."""

from __future__ import annotations

import hashlib
import warnings
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
NEAR = 0.05  # share of samples that are as close to a training sample by chance
NEIGHBOURS_OF, NEIGHBOURS_AMONG = 300, 2000  # held-out samples that are compared, training samples of a class
FEWEST_COMPARED, HALF_WAY = 20, 0.5
TEMPERATURES = (0.05, 20.0)
USUAL_SPREAD = (0.1, 100.0)  # standard deviation of the logits of a sample

HOW_TO_HOLD_OUT = (
    "hold out a part of the training images (longtail train --validation 0.1; or --validation 0.02 --validation-from "
    "head, which costs the tail nothing), pass held-out outputs (validation=, --validation FILE), or, if the backbone "
    'was never trained on these images, HALO(held_out="cross-fit") (--method halo --options held-out cross-fit)'
)


def require_unseen(train: FitData, held_out: FitData) -> None:
    """Refuse held-out samples whose rows (logits, and features where both have them) are training rows.

    Samples that nearly are training samples are warned of. Cross-validated outputs are given as both: each row is the
    output of a model that has not seen its sample.
    """
    if train is held_out:
        return
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
    _warn_of_near_duplicates(train, held_out)


def _warn_of_near_duplicates(train: FitData, held_out: FitData) -> None:
    """Warn if held-out samples are much closer to a training sample than training samples are to each other.

    The distance of a sample to its nearest training sample of the same class is divided by the distance of that one to
    its own nearest neighbour. Training samples, each left out in turn, give the usual values of this ratio, whatever
    dimension and density. Near are samples below the 5 % quantile of them, and below a half: in many dimensions, the
    centre of a class is closer to all of its samples than these are to each other.
    """
    usual, ratios, found = [], [], []
    chosen = np.linspace(0, len(held_out.labels) - 1, min(len(held_out.labels), NEIGHBOURS_OF)).astype(np.int64)
    labels, train_labels = held_out.labels.numpy()[chosen], train.labels.numpy()
    for label in np.unique(labels):
        members, queries = np.flatnonzero(train_labels == label), chosen[labels == label]
        pool = members[np.linspace(0, len(members) - 1, min(len(members), NEIGHBOURS_AMONG)).astype(np.int64)]
        if len(pool) < 4:
            continue
        rows = _space(train, held_out, train, pool)
        left_out = np.linspace(0, len(pool) - 1, min(len(queries), len(pool))).astype(np.int64)
        usual.append(_nearness(rows[torch.from_numpy(left_out)], rows, left_out))
        ratios.append(_nearness(_space(train, held_out, held_out, queries), rows))
        found.append(np.full(len(queries), len(pool) / max(train.class_counts[label], len(members))))
    size = sum(map(len, ratios))
    if size < FEWEST_COMPARED:
        return
    near = np.concatenate(ratios) < min(np.quantile(np.concatenate(usual), NEAR), HALF_WAY)
    # A copy is found if its original is in the pool.
    expected = NEAR + DUPLICATES * float(np.concatenate(found).mean())
    if near.mean() > expected + 3 * np.sqrt(expected * (1 - expected) / size):
        warnings.warn(
            f"{near.sum()} of {size} held-out samples are nearly training samples: they are closer to one than "
            "training samples are to each other; if the network has seen them, the fit will be overconfident; pass "
            "other held-out samples",
            stacklevel=3,
        )


def _space(train: FitData, held_out: FitData, of: FitData, rows: np.ndarray) -> Tensor:
    """(B, D) features of some samples, or their logits where one of the sets has no features."""
    if train.features is None or held_out.features is None or of.features is None:
        return of.rows.read(rows).double()
    return LogitRows(of.features).read(rows).double()


def _nearness(queries: Tensor, pool: Tensor, own: np.ndarray | None = None) -> np.ndarray:
    """(B,) distance of each query to its nearest row of the pool, divided by that one's to its own nearest row.

    `own` are the positions of queries that are rows of the pool: they are no neighbours.
    """
    distances = torch.cdist(queries, pool)
    if own is not None:
        distances[torch.arange(len(queries)), torch.from_numpy(own)] = torch.inf
    nearest, position = distances.min(1)
    spacing = torch.cdist(pool[position], pool)
    spacing[torch.arange(len(queries)), position] = torch.inf
    if own is not None:
        spacing[torch.arange(len(queries)), torch.from_numpy(own)] = torch.inf
    usual = spacing.min(1).values
    return torch.where(nearest == usual, 1.0, nearest / usual).numpy()


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
