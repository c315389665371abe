"""How sure a score is: intervals over seeds, and paired bootstrap intervals on one test set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A value and where it lies with 95 % confidence; without bounds where one sample says nothing of spread."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def over_seeds(values: list[float]) -> Interval:
    """Mean over seeds with Student's interval.

    >>> interval = over_seeds([0.80, 0.82, 0.81])
    >>> round(interval.value, 3), round(interval.half_width, 3)
    (0.81, 0.025)
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean)
    spread = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    half = float(student.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * spread
    return Interval(mean, mean - half, mean + half)


def paired_difference(first: np.ndarray, second: np.ndarray, labels: np.ndarray, *, seed: int = 0) -> Interval:
    """Difference of balanced accuracy, first minus second, with a paired bootstrap interval.

    Args:
        first: (S, N) whether each of N test samples is recognised, for S seeds.
        second: the same of the other method, on the same samples.
        labels: (N,) true classes; samples are drawn anew within each class.
        seed: decides the resamples.
    """
    per_class = class_differences(first, second, labels, seed=seed)[0]
    means = per_class.mean(1)
    low, high = np.quantile(means[1:], [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Interval(float(means[0]), float(low), float(high))


def class_differences(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Differences of accuracy per class, (1 + resamples, classes present), and those classes.

    Row 0 is the observed difference, the others are bootstrap resamples.
    """
    change = np.atleast_2d(first).astype(np.float64).mean(0) - np.atleast_2d(second).astype(np.float64).mean(0)
    rng = np.random.default_rng(seed)
    present = np.unique(labels)
    columns = []
    for label in present:
        own = change[labels == label]
        # Only the number of times each distinct change is drawn matters, which keeps this small.
        values, counts = np.unique(own, return_counts=True)
        drawn = rng.multinomial(len(own), counts / len(own), size=RESAMPLES)
        columns.append(np.concatenate([[own.mean()], drawn @ values / len(own)]))
    return np.column_stack(columns), present
