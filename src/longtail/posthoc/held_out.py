"""Held-out samples: a check that they are no training samples, stratified folds, and out-of-fold logits.

Methods that are fitted on training outputs have not used any held-out sample. Methods that use held-out samples in
their fit (HALO, a temperature) are fitted again in folds, so that each sample is scored by a fit that has not used it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from longtail.errors import UserError
from longtail.outputs.checks import require_same_classes
from longtail.outputs.rows import LogitRows

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc
    from longtail.posthoc.inputs import FitData

FOLDS, FEWEST_FOLDS = 5, 3
DUPLICATES = 0.1  # share of the held-out rows that may equal training rows: duplicates within a data set
NEAR = 0.05  # share of samples that are as close to a training sample by chance
NEIGHBOURS_OF, NEIGHBOURS_AMONG = 300, 2000  # held-out samples that are compared, training samples of a class
FEWEST_COMPARED, HALF_WAY = 20, 0.5
OTHER_SCALE = 5.0  # ratio of the spread of training and held-out logits that no model has

HOW_TO_HOLD_OUT = (
    "hold out a part of the training images (longtail train --validation 0.1; or --validation 0.02 --validation-from "
    "head, which costs the tail nothing), pass held-out outputs (validation=, --validation FILE), or, if the backbone "
    'was never trained on these images, HALO(held_out="cross-fit") (--method halo --options held-out cross-fit)'
)


def compared_with_training(train: FitData, held_out: FitData, *, refuse: bool) -> FitData:
    """Held-out samples with `seen` set if their rows (logits, and features where both have them) are training rows.

    Samples that nearly are training samples are warned of. Cross-validated outputs are given as both: each row is the
    output of a model that has not seen its sample.

    Args:
        train: training samples.
        held_out: held-out samples.
        refuse: raise an error if they are training samples.
    """
    if train is held_out:
        return held_out
    require_same_classes(train.class_names, held_out.class_names)
    if train.features is not None and held_out.features is not None:
        widths = train.features.shape[1], held_out.features.shape[1]
        if widths[0] != widths[1]:
            raise UserError(f"training outputs have {widths[0]} features per sample, held-out outputs {widths[1]}")
    shared = samples_in_common(train, held_out)
    if not shared:
        _warn_of_near_duplicates(train, held_out)
        _warn_of_another_scale(train, held_out)
        return held_out
    if refuse:
        raise UserError(
            f"{shared} of {len(held_out.labels)} held-out samples are training samples too (their rows are equal); "
            "a fit on samples that the network has seen would be overconfident; pass other held-out samples"
        )
    return replace(held_out, seen=True)


def samples_in_common(train: FitData, other: FitData) -> int:
    """Rows of the other samples that are rows of the training samples; 0 if they are few enough to be duplicates."""
    with_features = train.features is not None and other.features is not None
    train_rows = Counter(_digests(train, with_features=with_features))
    other_rows = _digests(other, with_features=with_features)
    shared, size = sum(digest in train_rows for digest in other_rows), len(other_rows)
    # Rows with few digits (two classes, one decimal) are often equal by chance, then within the training set, too.
    by_chance = sum(number for number in train_rows.values() if number > 1) / train_rows.total()
    # Fewer copies are among the rows if the training outputs are a subsample.
    share = np.minimum(train.seen_counts / np.maximum(train.class_counts, 1), 1)[other.labels.numpy()]
    duplicates = DUPLICATES * share.sum() + 3 * np.sqrt(DUPLICATES * (share * (1 - share)).sum())
    return shared if shared == size or shared > max(duplicates + by_chance * size, 1) else 0


def _digests(data: FitData, *, with_features: bool) -> list[bytes]:
    """One digest per row (N,) of the logits, and of the features if asked for."""
    features = LogitRows(data.features) if with_features and data.features is not None else None
    digests: list[bytes] = []
    for where, chunk in data.rows.stored.chunks():
        arrays = [chunk] if features is None else [chunk, features.read(where)]
        rows = zip(*(np.ascontiguousarray(array.numpy()) for array in arrays), strict=True)
        digests += [
            hashlib.blake2b(b"".join(values.tobytes() for values in row), digest_size=16).digest() for row in rows
        ]
    return digests


def _warn_of_near_duplicates(train: FitData, held_out: FitData) -> None:
    """Warn if held-out samples are much closer to a training sample than training samples are to each other.

    The distance of a sample to its nearest training sample of the same class is divided by the distance of that one to
    its nearest neighbour. Training samples, each left out in turn, give the usual values of this ratio, whatever
    dimension and density. Near are samples below the 5 % quantile of them, and below a half: in many dimensions, the
    centre of a class is closer to all of its samples than these are to each other.
    """
    train_rows, rows = train.rows, held_out.rows
    if train.features is not None and held_out.features is not None:
        train_rows, rows = LogitRows(train.features), LogitRows(held_out.features)
    usual, ratios, found = [], [], []
    chosen = np.linspace(0, len(held_out.labels) - 1, min(len(held_out.labels), NEIGHBOURS_OF)).astype(np.int64)
    labels, train_labels = held_out.labels.numpy()[chosen], train.labels.numpy()
    for label in np.unique(labels):
        members, queries = np.flatnonzero(train_labels == label), chosen[labels == label]
        pool = members[np.linspace(0, len(members) - 1, min(len(members), NEIGHBOURS_AMONG)).astype(np.int64)]
        if len(pool) < 4:
            continue
        neighbours = train_rows.read(pool).double()
        left_out = np.linspace(0, len(pool) - 1, min(len(queries), len(pool))).astype(np.int64)
        usual.append(_nearness(neighbours[torch.from_numpy(left_out)], neighbours, left_out))
        ratios.append(_nearness(rows.read(queries).double(), neighbours))
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


def _warn_of_another_scale(train: FitData, held_out: FitData) -> None:
    """Warn if held-out logits are much larger or smaller than training logits: a model makes both alike."""
    usual, own = _spread(train), _spread(held_out)
    if not usual / OTHER_SCALE <= own <= usual * OTHER_SCALE:
        warnings.warn(
            f"the held-out logits are {own / usual:.2g} times as large as the training logits: take both from the same "
            "model, in the same units",
            stacklevel=3,
        )


def _spread(data: FitData) -> float:
    """Standard deviation of the logits of a sample, over evenly spaced samples."""
    chosen = np.linspace(0, len(data.labels) - 1, min(len(data.labels), NEIGHBOURS_AMONG)).astype(np.int64)
    logits = data.rows.read(chosen).double()
    return float((logits - logits.mean(1, keepdim=True)).std(correction=0))


def _nearness(queries: Tensor, pool: Tensor, positions: np.ndarray | None = None) -> np.ndarray:
    """(B,) distance of each query to its nearest row of the pool, divided by the distance of that row to its nearest.

    `positions` are those of queries that are rows of the pool: a row is no neighbour of itself.
    """
    queried = torch.arange(len(queries))
    distances = torch.cdist(queries, pool)
    if positions is not None:
        distances[queried, torch.from_numpy(positions)] = torch.inf
    nearest, position = distances.min(1)
    spacing = torch.cdist(pool[position], pool)
    spacing[queried, position] = torch.inf
    if positions is not None:
        spacing[queried, torch.from_numpy(positions)] = torch.inf
    usual = spacing.min(1).values
    return torch.where(nearest == usual, 1.0, nearest / usual).numpy()


def number_of_folds(counts: np.ndarray) -> int:
    """As many folds as the smallest class with two samples or more allows, 3 to 5, for class counts (K,)."""
    return int(np.clip(counts[counts > 1].min(initial=FOLDS), FEWEST_FOLDS, FOLDS))


def stratified_folds(labels: np.ndarray, number: int, seed: int, *, keep_single: bool = False) -> list[np.ndarray]:
    """Rows that each fold leaves out, in rising order; every class is spread evenly over the folds.

    Args:
        labels: (N,) classes.
        number: of folds.
        seed: random seed.
        keep_single: never leave out the only sample of a class, so that the other folds have samples of every class.
    """
    rng = np.random.default_rng(seed)
    fold = np.full(len(labels), -1)
    order = np.argsort(labels, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(rows) > 1 or not keep_single:
            fold[rng.permutation(rows)] = (np.arange(len(rows)) + rng.integers(number)) % number
    return [np.flatnonzero(fold == which) for which in range(number)]


def out_of_fold_logits(method: PostHoc, data: FitData, held_out: FitData, folds: Sequence[np.ndarray]) -> Tensor:
    """Calibrated logits (M, K) of held-out samples, each by a fit that has not used it.

    A setting that was chosen on all of them is not chosen again.

    Args:
        method: fitted on `data`, with all held-out samples.
        data: training samples; the held-out samples themselves if these are cross-validated.
        held_out: held-out samples.
        folds: rows that each fold leaves out.
    """
    fitted_on_them = data is held_out and (method.learns_from_seen or method.needs_features)
    if not (method.needs_validation or fitted_on_them):
        return calibrated_logits(method, held_out)
    logits = torch.empty(held_out.rows.shape)
    for left_out in folds:
        kept, fitted = held_out.subset(np.setdiff1d(np.arange(len(held_out.labels)), left_out)), method
        if fitted_on_them:
            chosen = {name: method.chosen_[name] for name in method.tuned}
            fitted = clone(method).set_params(**chosen).fit_checked(kept, kept, judge=False)
        elif (kept.seen_counts > 0).sum() > 1:
            fitted = method.refitted(data, kept)
        if len(left_out):
            logits[torch.from_numpy(left_out)] = calibrated_logits(fitted, held_out.subset(left_out))
    return logits


def calibrated_logits(method: PostHoc, data: FitData) -> Tensor:
    """Calibrated logits (M, K) of samples, in float32."""
    chunks = []
    for rows, logits in data.rows.chunks():
        features = None if data.features is None else torch.as_tensor(np.array(data.features[rows])).float()
        chunks.append(method.apply_finite(logits, features))
    return torch.cat(chunks)
