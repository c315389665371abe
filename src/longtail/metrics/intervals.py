"""95 % confidence intervals of scores over seeds, and of differences on the same test images.

A difference of balanced accuracy varies for two reasons: another seed trains another network, and
other test images would give other numbers. With three seeds or more both are in the interval; with
fewer only the images are. The variance of the mean over S seeds and K classes is the sum

    V = A + B - C,    A: variance of the seeds' differences / S,
                      B: sum over classes of (variance of an image's mean difference) / (n_c K^2),
                      C: what A and B both contain (the residual of seed and image), counted once,

and the interval is Student's with Satterthwaite's degrees of freedom. A class with few test images
gives a poor estimate of its own variance, so two images with the variance of the average class are added to
each class. Then no interval has width zero, even with one image per class.

Papers: Satterthwaite, An approximate distribution of estimates of variance components, 1946;
Agresti and Min, Simple improved confidence intervals for comparing matched proportions, 2005.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FEWEST_SEEDS = 3  # fewer seeds give no usable estimate of the variance
ADDED_IMAGES = 2  # added to every class, with the variance of the average class


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % confidence interval; bounds are None if the variance is unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class ClassIntervals:
    """A value per class (K,) with its bounds; NaN where a class has no test image."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def over_seeds(values: list[float]) -> Interval:
    """Mean over seeds with Student's interval; no bounds from fewer than three.

    >>> interval = over_seeds([0.80, 0.82, 0.81])
    >>> round(interval.value, 3), round(interval.half_width, 3)
    (0.81, 0.025)
    """
    mean = float(np.mean(values))
    if len(values) < FEWEST_SEEDS:
        return Interval(mean)
    return _student(mean, float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def paired_difference(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, class_counts: np.ndarray | None = None
) -> Interval:
    """Difference of balanced accuracy, first minus second, on the same test images.

    Args:
        first: (S, N) whether each of N predictions is correct, for S seeds.
        second: the same for the other method.
        labels: (N,) true classes.
        class_counts: (K,) training images per class; if given, the difference of top-1 at the training prior.
    """
    change = np.atleast_2d(first).astype(np.float64) - np.atleast_2d(second).astype(np.float64)
    seeds = len(change)
    present, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    classes = len(sizes)
    shares = np.ones(classes) if class_counts is None else class_counts[present].astype(np.float64)
    shares = shares / shares.sum() if shares.any() else np.full(classes, 1 / classes)
    per_seed = np.stack([np.bincount(codes, row, classes) / sizes for row in change])  # (S, K)
    of_seed = per_seed @ shares
    value = float(of_seed.mean())
    of_images = image_variances(change.mean(0), codes, sizes) * shares**2 / sizes
    spread, freedom = of_images.sum(), np.square(of_images) / (sizes + ADDED_IMAGES - 1)
    if seeds < FEWEST_SEEDS:
        return _possible(_student(value, float(spread), float(spread**2 / freedom.sum())))
    of_seeds = float(of_seed.var(ddof=1)) / seeds
    residual = change - change.mean(0) - per_seed[:, codes] + per_seed.mean(0)[codes]
    squares = np.bincount(codes, np.square(residual).sum(0), classes) / (np.maximum(sizes - 1, 1) * (seeds - 1))
    both = float((squares * shares**2 / (sizes * seeds)).sum())
    variance = max(of_seeds + float(spread) - both, of_seeds, float(spread))
    return _possible(_student(value, variance, variance**2 / (of_seeds**2 / (seeds - 1) + float(freedom.sum()))))


def image_variances(change: np.ndarray, codes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Variance (K,) of one image's change in each class, from its own images and two added images of the average class.

    `change` (N,) is the mean over seeds, `codes` (N,) the class of each image, `sizes` (K,) images per class.
    """
    everything = (np.square(change).sum() + 1) / (len(change) + 2), change.sum() / (len(change) + 2)
    weights = (np.square(change), change)
    square, mean = (
        (np.bincount(codes, own, len(sizes)) + ADDED_IMAGES * average) / (sizes + ADDED_IMAGES)
        for own, average in zip(weights, everything, strict=True)
    )
    return np.maximum(square - mean**2, 0)


def images_to_settle(change: Interval, images: int) -> int | None:
    """From about how many images on the interval of such a change is above zero: it narrows with their root.

    None if the change is not positive, or if more than a hundred times as many are needed.

    >>> images_to_settle(Interval(0.1, -0.1, 0.3), 36), images_to_settle(Interval(-0.1, -0.3, 0.1), 36)
    (150, None)
    """
    if change.half_width is None or change.value <= 0 or change.half_width > 10 * change.value:
        return None
    needed = max(images * (change.half_width / change.value) ** 2, images + 1)
    digits = max(len(str(round(needed))) - 2, 0)
    return int(np.ceil(needed / 10**digits) * 10**digits)


def class_differences(first: np.ndarray, second: np.ndarray, labels: np.ndarray, num_classes: int) -> ClassIntervals:
    """Difference of accuracy of each class, first minus second, with an adjusted Wald interval over its images.

    Half an image is added to each of the four cells (each method correct or wrong), so that an interval from few
    images does not have width zero.
    """
    change = np.atleast_2d(first).astype(np.float64).mean(0) - np.atleast_2d(second).astype(np.float64).mean(0)
    sizes = np.bincount(labels, minlength=num_classes)
    total, squares = (np.bincount(labels, own, num_classes) for own in (change, np.square(change)))
    with np.errstate(invalid="ignore"):
        value = np.where(sizes > 0, total / sizes, np.nan)
    centre = total / (sizes + 2)
    from scipy.special import ndtri  # late: SciPy takes a while to import, and scores need none of it

    half = ndtri(0.5 + CONFIDENCE / 2) * np.sqrt(np.maximum(squares + 1 - total * centre, 0)) / (sizes + 2)
    # The adjustment moves the centre of the interval; the observed value must still lie inside. NaN stays NaN.
    low, high = np.minimum(centre - half, value), np.maximum(centre + half, value)
    return ClassIntervals(value, np.maximum(low, -1), np.minimum(high, 1))


@dataclass(frozen=True)
class Fallen:
    """A class whose accuracy fell by more than its confidence interval."""

    name: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name} ({100 * self.before:.0f} → {100 * self.after:.0f})"


def fallen_classes(before: np.ndarray, after: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[Fallen]:
    """The classes whose accuracy fell significantly, the largest fall first.

    Args:
        before: (N,) whether each prediction was correct before; of several seeds, how often.
        after: (N,) the same now.
        labels: (N,) true classes.
        names: (K,) of the classes.
    """
    change = class_differences(after, before, labels, len(names))
    found = np.flatnonzero(change.high < 0).tolist()
    shares = {label: (before[labels == label].mean(), after[labels == label].mean()) for label in found}
    deepest = sorted(found, key=lambda label: change.value[label])
    return [Fallen(names[label], float(shares[label][0]), float(shares[label][1])) for label in deepest]


def collapsed_classes(fallen: list[Fallen], names: Sequence[str], class_counts: np.ndarray) -> list[Fallen]:
    """Of the fallen classes, those of the largest third that keep less than a fifth of their accuracy.

    >>> lost = [Fallen("ant", 0.48, 0.02), Fallen("fly", 0.3, 0.0)]
    >>> [one.name for one in collapsed_classes(lost, ("ant", "bee", "fly"), np.array([90, 20, 9]))]
    ['ant']
    """
    large = {names[label] for label in np.argsort(-class_counts, kind="stable")[: max(len(names) // 3, 1)]}
    return [one for one in fallen if one.name in large and one.after < one.before / 5]


def fallen_text(fallen: list[Fallen], most: int = 10) -> str:
    """The names of classes whose accuracy fell; of many classes, only the largest falls.

    >>> fallen_text([Fallen("Unknown", 0.63, 0.0), Fallen("cat", 0.8, 0.7)], most=1)
    'Unknown (63 → 0), and 1 more'
    """
    more = f", and {len(fallen) - most} more" if len(fallen) > most else ""
    return ", ".join(str(one) for one in fallen[:most]) + more


def _possible(difference: Interval) -> Interval:
    """An interval of a difference between two accuracies ends at -1 and 1."""
    low, high = (None if bound is None else min(max(bound, -1.0), 1.0) for bound in (difference.low, difference.high))
    return Interval(difference.value, low, high)


def _student(value: float, variance: float, freedom: float) -> Interval:
    from scipy.special import stdtrit

    half = float(stdtrit(max(freedom, 1.0), 0.5 + CONFIDENCE / 2)) * float(np.sqrt(variance))
    return Interval(value, value - half, value + half)


def show_difference(interval: Interval | None) -> str:
    """A difference of shares in points, with its interval; empty if there is none.

    >>> show_difference(Interval(0.021, 0.01, 0.03)), show_difference(Interval(0.304))
    ('+2.1 [+1.0, +3.0]', '+30.4')
    """
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{100 * interval.value:+.1f}"
    return f"{100 * interval.value:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
