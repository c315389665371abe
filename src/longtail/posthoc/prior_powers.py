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
DIRECTIONS = 32


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

    def misfit(self, posteriors: np.ndarray, power: float, weights: np.ndarray | None = None) -> Misfit:
        """How far class frequencies, the mean posteriors at pi^p of samples with weights (N,), are from pi^p."""
        shares, number = np.exp(self.at(power)), len(posteriors)
        own = np.full(number, 1 / number) if weights is None else weights / weights.sum()
        mean = np.zeros(len(shares))
        for rows in _chunks(number):
            mean += own[rows] @ self.moved(posteriors[rows], power)
        # Of the covariance of the mean: its trace, and its Frobenius norm by random directions.
        directions = np.random.default_rng(0).normal(size=(len(shares), DIRECTIONS))
        images, trace, of_each = np.zeros_like(directions), 0.0, 0.0
        for rows in _chunks(number):
            off = own[rows, None] * (self.moved(posteriors[rows], power) - mean) / np.sqrt(shares)
            images += off.T @ (off @ directions)
            squares = np.square(off).sum(1)
            trace, of_each = trace + float(squares.sum()), of_each + float(np.square(squares).sum())
        spread = max(float(np.square(images).sum()) / DIRECTIONS - of_each, np.finfo(float).tiny)
        surplus = mean - shares
        distance, freedom = float((np.square(surplus) / shares).sum()), trace**2 / spread
        p_value = float(chdtrc(freedom, distance / trace * freedom)) if trace > 0 else 1.0
        return Misfit(distance - trace, float(np.sqrt(2 * spread)), p_value, surplus)


@dataclass(frozen=True)
class Misfit:
    """Class frequencies that differ from those of a power.

    Args:
        distance: squared, that of the chi-square test, minus what chance adds.
        error: its standard error if there is no difference; the distribution of chance is then a chi-square.
        p_value: of no difference.
        surplus: (C,) frequencies minus those of the power.
    """

    distance: float
    error: float
    p_value: float
    surplus: np.ndarray


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
