"""Stratified folds for few samples per class."""

from __future__ import annotations

import numpy as np

FEWEST, MOST = 3, 5


def number_of_folds(counts: np.ndarray) -> int:
    """As many folds as the smallest class with two samples allows, 3 to 5, for class counts (K,)."""
    several = counts[counts > 1]
    return int(np.clip(several.min(), FEWEST, MOST)) if len(several) else FEWEST


def stratified(labels: np.ndarray, number: int, seed: int) -> list[np.ndarray]:
    """Rows held out by each fold, in rising order; the only sample of a class is never held out."""
    rng = np.random.default_rng(seed)
    fold = np.full(len(labels), -1)
    order = np.argsort(labels, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(rows) > 1:
            fold[rng.permutation(rows)] = (np.arange(len(rows)) + rng.integers(number)) % number
    return [np.flatnonzero(fold == which) for which in range(number)]
