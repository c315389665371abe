"""Settings that several methods share: their checks, and the choice of "auto" on held-out outputs.

A setting is never chosen on the training images and never on the test split.
"""

from __future__ import annotations

import numpy as np
import torch

from longtail.errors import UserError, number, whole_number
from longtail.metrics.scores import evaluate_predictions
from longtail.posthoc.inputs import FitData

TAUS = GAMMAS = tuple(round(0.1 * step, 1) for step in range(21))  # candidates of "auto"
INTERPOLATED = 5  # solutions that the start of another one is interpolated from


def check_exact(ridge: object, tolerance: object, max_iter: object) -> None:
    """Settings of the minimiser: weight decay, how exact, how many passes (None: the method's default)."""
    number("ridge", ridge, at_least=0)
    check_minimiser(tolerance, max_iter)


def check_minimiser(tolerance: object, max_iter: object) -> None:
    """The same without weight decay."""
    number("tolerance", tolerance, above=0)
    if max_iter is not None:
        whole_number("max_iter", max_iter)


def check_sgd(batch_size: object, lr: object, seed: object) -> None:
    """Settings of gradient steps."""
    whole_number("batch_size", batch_size)
    number("lr", lr, above=0)
    whole_number("seed", seed, at_least=0)


def number_or_auto(value: object, name: str, **bounds: float) -> None:
    """A setting is "auto" or a number within bounds."""
    try:
        if value != "auto":
            number(name, value, **bounds)
    except UserError as error:
        raise UserError(f'{error}; or "auto"') from error


def require_validation(validation: FitData | None, setting: str) -> FitData:
    """The held-out outputs, or an error that explains why they are needed."""
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


def interpolated(solutions: dict[float, np.ndarray], setting: float) -> np.ndarray:
    """The solution for one setting, extrapolated or interpolated by a polynomial through those of the nearest settings.

    No two of these are closer to each other than this setting is to the nearest: a polynomial through a close group
    says nothing about settings far from it.

    >>> interpolated({0.0: np.array([0.0]), 1.0: np.array([1.0]), 3.0: np.array([9.0])}, 2.0).tolist()
    [4.0]
    """
    nearest: list[float] = []
    for one in sorted(solutions, key=lambda other: abs(other - setting)):
        apart = min((abs(one - other) for other in nearest), default=np.inf)
        if len(nearest) < INTERPOLATED and apart > 0.99 * abs(setting - (nearest or [one])[0]):
            nearest.append(one)
    shares = [
        np.prod([(setting - other) / (one - other) for other in nearest if other != one], initial=1.0)
        for one in nearest
    ]
    return np.asarray(sum(share * solutions[one] for share, one in zip(shares, nearest, strict=True)))
