"""Long-tailed class counts, and the selection of images that gives them.

Exponential: `n_j = floor(n_max * (1 / factor) ** (j / (K - 1)))`. Step: the first half of the
classes keeps `n_max`, the rest `floor(n_max / factor)`. The factor is `n_max / n_min`.

Paper: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, CVPR 2019 (exponential);
Buda et al., A systematic study of the class imbalance problem, Neural Networks 2018 (step).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from longtail.errors import UserError, choose, whole_number

TEST_ORDERS = ("forward", "backward")


def long_tail_counts(
    num_classes: int, largest: int, factor: float, profile: Literal["exp", "step"] = "exp"
) -> np.ndarray:
    """Images per class, head to tail, (K,) int64.

    >>> long_tail_counts(10, 5000, 100).tolist()
    [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    if not factor >= 1:
        raise UserError(f"the imbalance factor is n_max / n_min and must be at least 1, not {factor}")
    if num_classes == 1:
        return np.full(num_classes, largest)
    if profile == "step":
        tail = np.arange(num_classes) >= num_classes // 2
        return np.where(tail, int(largest / factor), largest)
    counts = [int(largest * (1 / factor) ** (j / (num_classes - 1))) for j in range(num_classes)]
    return np.array(counts)


def long_tail_indices(labels: np.ndarray, counts: np.ndarray, seed: int | None) -> np.ndarray:
    """Which images to keep, sorted: `counts[c]` of class c, chosen by the seed alone.

    For one seed a smaller count keeps a subset of what a larger count keeps. Without a seed (None) the images are
    the standard subset, that of the code of LDAM-DRW: one legacy generator with seed 0 shuffles the images of each
    class in turn, and the first ones stay.
    """
    kept = []
    standard = np.random.RandomState(0)
    for label, count in enumerate(counts):
        of_class = np.flatnonzero(labels == label)
        if count < 1:
            raise UserError(f"class {label} is left without images (count {count}); use a smaller imbalance factor")
        if count > len(of_class):
            raise UserError(f"class {label} has {len(of_class)} images, {count} are asked for")
        draw = standard if seed is None else np.random.default_rng((seed, label))
        kept.append(draw.permutation(of_class)[:count])
    return np.sort(np.concatenate(kept))


def validation_indices(
    labels: np.ndarray, fraction: float, seed: int, *, only_head: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stratified validation split: (training indices, validation indices), both sorted.

    Of each class `round(fraction * n)` images are held out, at least one if the class has two, and at least one
    stays. With `only_head` this applies to the larger half of the classes; the others keep all their images.
    """
    held_out = []
    classes, sizes = np.unique(labels, return_counts=True)
    if only_head:
        classes = np.sort(classes[np.argsort(-sizes, kind="stable")[: (len(classes) + 1) // 2]])
    for label in classes:
        of_class = np.flatnonzero(labels == label)
        count = min(max(round(fraction * len(of_class)), 1), len(of_class) - 1)
        # The third entry makes this draw independent of the one that selects the long tail with the same seed.
        held_out.append(np.random.default_rng((seed, int(label), 1)).permutation(of_class)[:count])
    validation = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), validation), validation


def profile_indices(
    labels: np.ndarray, factor: float, order: str = "forward", *, class_order: np.ndarray | None = None, seed: int = 0
) -> np.ndarray:
    """Which images of a balanced test set to keep, sorted, so that their class counts are exponential.

    `forward`: the classes with most training images have most test images; `backward`: the reverse. The largest class
    keeps as many images as the smallest class of the test set has, the smallest class `1 / factor` of them. The
    published factors are 2, 5, 10, 25 and 50.

    Papers: Hong et al., Disentangling Label Distribution for Long-tailed Visual Recognition, CVPR 2021 (LADE);
    Zhang et al., Self-Supervised Aggregation of Diverse Experts, NeurIPS 2022 (SADE).

    Args:
        labels: (N,) classes 0..K-1 of the test images.
        factor: imbalance of the chosen images, largest class / smallest class.
        order: `forward` or `backward`.
        class_order: (K,) classes from the most to the fewest training images (default: 0, 1, …, K - 1).
        seed: selects the images of each class; a larger factor keeps a subset of what a smaller factor keeps.

    >>> labels = np.repeat([0, 1, 2], 100)
    >>> np.bincount(labels[profile_indices(labels, 25, "backward")]).tolist()
    [4, 20, 100]
    """
    choose("order", order, TEST_ORDERS)
    sizes = np.bincount(labels)
    classes = np.arange(len(sizes)) if class_order is None else np.asarray(class_order)
    if len(sizes) > len(classes) or not np.array_equal(np.sort(classes), np.arange(len(classes))):
        raise UserError(f"class_order must name each of the classes 0..{len(sizes) - 1} once")
    if len(sizes) < len(classes) or not sizes.all():
        raise UserError("a class has no test image; a test profile needs images of every class")
    counts = np.empty(len(sizes), np.int64)
    counts[classes if order == "forward" else classes[::-1]] = long_tail_counts(len(sizes), int(sizes.min()), factor)
    return long_tail_indices(labels, counts, seed)


def subsample_per_class(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Which samples to take, sorted: at most `most` of every class, chosen by the seed alone.

    For one seed a smaller number takes a subset of what a larger number takes.

    >>> subsample_per_class(np.array([0, 0, 0, 1]), most=1, seed=0).tolist()
    [1, 3]
    """
    # The third entry makes this draw independent of those of the long tail and the validation split.
    order = np.random.default_rng((seed, 0, 2)).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    classes = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return np.sort(np.concatenate([of_class[:most] for of_class in classes]))


@dataclass(frozen=True)
class ClassSubsample:
    """At most `most` images of every class, chosen by the seed."""

    most: int
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("images_per_class", self.most)
        whole_number("seed", self.seed, at_least=0)

    def rows(self, labels: np.ndarray) -> np.ndarray:
        """Rows of the chosen images, given the labels (N,) of all, sorted."""
        return subsample_per_class(labels, self.most, self.seed)
