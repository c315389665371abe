"""Powers pi^p of a class prior: their likelihood for samples with posteriors at a known prior, and their fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import chdtrc, logsumexp

from longtail.errors import UserError

POWERS = np.linspace(-4.0, 4.0, 161)
DROP = 1.92  # of the log-likelihood at the ends of a 95 % interval
LEAST_SPREAD = 0.1  # standard deviation of log pi over classes
CHUNK = 4096
COMPARED = 1000  # samples from which the variance of the misfit is estimated


@dataclass(frozen=True)
class PowerFamily:
    """The powers of a prior over its classes.

    Args:
        classes: (C,) classes that occur.
        log_prior: (C,) of the training prior.
        log_target: (C,) of the prior of the posteriors, normalised.
    """

    classes: np.ndarray
    log_prior: np.ndarray
    log_target: np.ndarray

    @classmethod
    def of(cls, log_prior: np.ndarray, log_target: np.ndarray) -> PowerFamily:
        if not is_spread_out(log_prior):
            raise UserError(
                "the classes are about equally frequent in training, so that all powers of the training prior are "
                "the same; give the target prior (weights per class)"
            )
        classes = np.flatnonzero(np.isfinite(log_prior))
        return cls(classes, log_prior[classes], log_target[classes] - logsumexp(log_target[classes]))

    def at(self, power: float) -> np.ndarray:
        """(C,) logarithm of pi^p, normalised."""
        return np.asarray(power * self.log_prior - logsumexp(power * self.log_prior))

    def curve(self, posteriors: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Log-likelihood of samples with posteriors (N, C), plus that of p, at every power."""
        powered = np.outer(self.log_prior, POWERS)
        ratios = np.exp(powered - logsumexp(powered, axis=0) - self.log_target[:, None])
        total = -0.5 * np.square(POWERS)
        for rows in _chunks(len(posteriors)):
            likelihood = np.log(posteriors[rows] @ ratios)
            total = total + (likelihood.sum(0) if weights is None else weights[rows] @ likelihood)
        return np.asarray(total)

    def moved(self, posteriors: np.ndarray, power: float) -> np.ndarray:
        """Posteriors (N, C) at the prior pi^p."""
        moved = posteriors * np.exp(self.at(power) - self.log_target)
        return np.asarray(moved / moved.sum(1, keepdims=True))

    def score(self, posteriors: np.ndarray, power: float) -> tuple[np.ndarray, float, float]:
        """(N,) derivative of each log-likelihood by p; mean and variance of log pi under pi^p."""
        shares = np.exp(self.at(power))
        mean = float(shares @ self.log_prior)
        return (
            self.moved(posteriors, power) @ self.log_prior - mean,
            mean,
            float(shares @ np.square(self.log_prior - mean)),
        )

    def misfit(self, posteriors: np.ndarray, power: float) -> tuple[float, float, np.ndarray]:
        """Squared distance of class frequencies from pi^p, its p-value, and the difference of both (C,).

        The frequencies are mean posteriors at pi^p. The distance is that of the chi-square test, minus what chance
        adds; the distribution of chance is a chi-square with the same mean and variance.
        """
        shares, number = np.exp(self.at(power)), len(posteriors)
        total, squares = np.zeros(len(shares)), np.zeros(len(shares))
        for rows in _chunks(number):
            moved = self.moved(posteriors[rows], power)
            total, squares = total + moved.sum(0), squares + np.square(moved).sum(0)
        surplus = total / number - shares
        distance = float((np.square(surplus) / shares).sum())
        by_chance = float(((squares / number - np.square(total / number)) / shares).sum()) / number
        some = self.moved(posteriors[np.linspace(0, number - 1, min(number, COMPARED)).astype(int)], power)
        products = (some - some.mean(0)) / np.sqrt(shares)
        products = products @ products.T
        np.fill_diagonal(products, 0.0)
        spread = np.square(products).sum() / (len(some) * (len(some) - 1)) / number**2
        freedom = by_chance**2 / max(spread, np.finfo(float).tiny)
        p_value = float(chdtrc(freedom, distance / by_chance * freedom)) if by_chance > 0 else 1.0
        return distance - by_chance, p_value, surplus


@dataclass(frozen=True)
class Peak:
    """The highest point of a log-likelihood: where it is, its 95 % interval, its negative curvature."""

    power: float
    low: float
    high: float
    curvature: float

    @property
    def is_inside(self) -> bool:
        """Whether it lies between the smallest and the largest power."""
        return bool(POWERS[0] < self.power < POWERS[-1])

    @classmethod
    def of(cls, curve: np.ndarray) -> Peak:
        """The peak of a curve over `POWERS`."""
        spline = CubicSpline(POWERS, curve)
        candidates = np.concatenate([spline.derivative().roots(extrapolate=False), POWERS[[0, -1]]])
        power = candidates[spline(candidates).argmax()]
        ends = spline.solve(float(spline(power)) - DROP, extrapolate=False)
        low, high = np.append(ends[ends < power], POWERS[0]).max(), np.append(ends[ends > power], POWERS[-1]).min()
        return cls(float(power), float(low), float(high), -float(spline(power, 2)))


def is_spread_out(log_prior: np.ndarray) -> bool:
    """Whether the powers of a prior differ."""
    present = log_prior[np.isfinite(log_prior)]
    return len(present) > 1 and float(present.std()) > LEAST_SPREAD


def _chunks(number: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, number, CHUNK))
