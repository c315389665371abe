"""The class distribution of a data set, before any training: how long is the tail?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.data.images import FileImages, warn_of_copies
from longtail.data.splits import Splits, find_data, open_splits
from longtail.metrics.scores import shot_groups, shot_names
from longtail.metrics.table import SHOTS
from longtail.recipes import RECIPES


@dataclass(frozen=True)
class ClassDistribution:
    """Training images per class.

    Args:
        name: of the data set.
        class_names: K names.
        class_counts: (K,) training images per class, with those that training holds out for validation. The same
            counts decide everywhere which classes are many-, medium- or few-shot.
        images: number of images in each split.
        source: where the images are, in one sentence.
        missing: image files that do not exist, although the counts include them.
        asked: the imbalance factor of a long tail that was made, before class sizes are rounded down.
    """

    name: str
    class_names: tuple[str, ...]
    class_counts: np.ndarray
    images: dict[str, int]
    source: str = ""
    missing: int = 0
    asked: float | None = None

    @property
    def order(self) -> np.ndarray:
        """Classes from head to tail, (K,)."""
        return np.argsort(-self.class_counts, kind="stable")

    @property
    def total(self) -> int:
        return int(self.class_counts.sum())

    @property
    def imbalance(self) -> float | None:
        """Images of the largest class divided by images of the smallest; None if a class has none."""
        smallest = int(self.class_counts.min())
        return float(self.class_counts.max()) / smallest if smallest else None

    @property
    def imbalance_text(self) -> str:
        """The imbalance factor, or how many classes have no image."""
        if self.imbalance:
            rounded = self.asked and f"{self.asked:.1f}" != f"{self.imbalance:.1f}"
            note = f" ({self.asked:g} before class sizes are rounded down)" if rounded else ""
            return f"imbalance factor {self.imbalance:.1f}{note}"
        empty = int((self.class_counts == 0).sum())
        return "1 class without an image" if empty == 1 else f"{empty:,} classes without an image"

    @property
    def gini(self) -> float:
        """0 if all classes are equally large, near 1 if one has nearly all images."""
        return gini(self.class_counts)

    @property
    def shots(self) -> list[str]:
        """The group of each class: many, medium or few."""
        return shot_names(self.class_counts)

    def group(self, name: str) -> tuple[int, int]:
        """Classes and images of a group."""
        mask = shot_groups(self.class_counts)[name]
        return int(mask.sum()), int(self.class_counts[mask].sum())

    def to_dict(self) -> dict[str, Any]:
        names, shots, total = self.class_names, self.shots, max(self.total, 1)
        counts = self.class_counts.tolist()
        groups = {name: dict(zip(("classes", "images"), self.group(name), strict=True)) for name in SHOTS}
        return {
            "data": self.name,
            "num_classes": len(counts),
            "images": self.images,
            "missing": self.missing,
            "largest": max(counts),
            "smallest": min(counts),
            "median": float(np.median(self.class_counts)),
            "imbalance_factor": self.imbalance,
            "gini": self.gini,
            "groups": groups,
            "classes": [
                {
                    "label": label,
                    "name": names[label],
                    "images": counts[label],
                    "share": counts[label] / total,
                    "group": shots[label],
                }
                for label in self.order.tolist()
            ],
        }


def distribution(
    data: str | Path, root: str | None = None, *, path_column: str | None = None, label_column: str | None = None
) -> ClassDistribution:
    """The class distribution of a recipe's data, an image folder or a file that lists images.

    Args:
        data: the name of a recipe, an image folder, or a list, CSV or Parquet file of images.
        root: folder of the data set (recipes), or folder that the paths in a file are relative to.
        path_column: column of the paths in a CSV or Parquet file, if its name is unusual.
        label_column: column of the labels in a CSV or Parquet file, if its name is unusual.

    >>> distribution("digits-lt").class_counts.tolist()
    [114, 78, 53, 36, 25, 17, 11, 8, 5, 3]
    """
    config = replace(find_data(str(data), root), path_column=path_column, label_column=label_column)
    splits = open_splits(config, need_every_class=False)
    sizes = {name: len(images) for name in ("train", "validation", "test") if (images := getattr(splits, name))}
    name = str(data) if str(data) in RECIPES else splits.name
    counts = splits.group_counts.numpy()
    warn_of_copies(splits.train, validation=splits.validation, test=splits.test)
    missing = _missing(splits)
    source = splits.summary()
    if missing:
        source += f"\n{len(missing):,} of these images do not exist; the first is {missing[0]}"
    asked = None if config.profile == "none" else config.imbalance
    return ClassDistribution(name, splits.train.class_names, counts, sizes, source, len(missing), asked)


def _missing(splits: Splits) -> list[Path]:
    every = (splits.train, splits.validation, splits.test)
    return [images.path(index) for images in every if isinstance(images, FileImages) for index in images.missing()]


def gini(counts: np.ndarray) -> float:
    """The Gini coefficient: mean absolute difference between two classes over twice the mean.

    >>> gini(np.array([5, 5, 5])), gini(np.array([9, 0]))
    (0.0, 0.5)
    """
    ordered = np.sort(counts).astype(np.float64)
    size, total = len(ordered), ordered.sum()
    if total == 0:
        return 0.0
    return float(2 * (np.arange(1, size + 1) * ordered).sum() / (size * total) - (size + 1) / size)
