"""Choosing a setting on held-out outputs, never on the training images and never on the test split."""

from __future__ import annotations

import numpy as np
import torch

from longtail.errors import UserError
from longtail.metrics.scores import evaluate_predictions
from longtail.posthoc.inputs import FitData

# What is tried for "auto".
TAUS = GAMMAS = tuple(round(0.1 * step, 1) for step in range(21))


def require_validation(validation: FitData | None, setting: str) -> FitData:
    """The held-out outputs, or an error that says why they are needed."""
    if validation is None:
        raise UserError(
            f'{setting}="auto" needs held-out outputs: fit(…, validation=outputs or (logits, y)), on the command line '
            "--validation FILE. Logits of training images are overconfident and lead to a bad choice"
        )
    order = np.argsort(-validation.class_counts, kind="stable")
    if not validation.seen_counts[order[len(order) // 2 :]].any():
        raise UserError(
            f'{setting}="auto" uses balanced accuracy, but only the larger classes have held-out samples; '
            "hold out images of every class (longtail train --validation 0.1), or use HALO"
        )
    return validation


def balanced_accuracy(scale: np.ndarray, shift: np.ndarray, held_out: FitData) -> float:
    """Mean accuracy of the classes when logits become `scale * logits + shift`."""
    factor, offset = torch.from_numpy(scale).float(), torch.from_numpy(shift).float()
    best = [torch.addcmul(offset, logits, factor).argmax(1) for _, logits in held_out.rows.chunks()]
    return evaluate_predictions(torch.cat(best), held_out.labels, held_out.class_counts).balanced


def best_setting(scores: dict[float, float], usual: float) -> float:
    """The setting with the best score; of equally good ones the nearest to the usual.

    >>> best_setting({0.0: 0.5, 0.9: 0.7, 1.4: 0.7}, usual=1.0)
    0.9
    """
    return max(scores, key=lambda setting: (scores[setting], -abs(setting - usual)))


NEIGHBOURS = 5


def between(known: dict[float, np.ndarray], setting: float) -> np.ndarray:
    """What the answers for other settings tell of the answer for this one: a polynomial through the nearest.

    No two of them are nearer to each other than this setting is to the nearest: a polynomial through a close group
    tells nothing of places far from it.

    >>> between({0.0: np.array([0.0]), 1.0: np.array([1.0]), 3.0: np.array([9.0])}, 2.0).tolist()
    [4.0]
    """
    nearest: list[float] = []
    for one in sorted(known, key=lambda other: abs(other - setting)):
        apart = min((abs(one - other) for other in nearest), default=np.inf)
        if len(nearest) < NEIGHBOURS and apart > 0.99 * abs(setting - (nearest or [one])[0]):
            nearest.append(one)
    shares = [
        np.prod([(setting - other) / (one - other) for other in nearest if other != one], initial=1.0)
        for one in nearest
    ]
    return np.asarray(sum(share * known[one] for share, one in zip(shares, nearest, strict=True)))
