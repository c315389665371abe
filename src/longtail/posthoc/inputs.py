"""Checks of the input of a post-hoc fit: invalid input raises an error instead of giving a wrong result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.outputs.checks import (
    Array,
    as_counts,
    as_features,
    as_labels,
    as_logits,
    as_norms,
    check_rows,
    require_every_class,
    vector,
)
from longtail.outputs.rows import LogitRows

if TYPE_CHECKING:
    from longtail.outputs.record import Outputs


@dataclass(frozen=True)
class FitData:
    """Checked input of a fit.

    Args:
        rows: logits (N, K).
        labels: (N,) int64 in 0..K-1.
        class_counts: (K,) training samples per class.
        weight_norms: (K,) norms of the head's class vectors; 1 where only logits are known.
        classes: (K,) the user's labels of the classes.
        features: (N, D), if known.
        weight: (K, D) of the head, if known.
        bias: (K,) of the head, if known.
        world: processes that share the work; each of them has all of the data at hand.
        names: (K,) of the classes in files, where they are not `classes`.
    """

    rows: LogitRows
    labels: Tensor
    class_counts: np.ndarray
    weight_norms: np.ndarray
    classes: np.ndarray
    features: Array | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    world: World = SINGLE_PROCESS

    names: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        return self.rows.shape[1]

    @property
    def class_names(self) -> tuple[str, ...]:
        """(K,) names of the classes in files."""
        return self.names or tuple(str(name) for name in self.classes)

    def part(self, chosen: np.ndarray) -> FitData:
        """Some of the samples, by index."""
        features = None if self.features is None else np.asarray(LogitRows(self.features).read(chosen))
        rows, labels = LogitRows(self.rows.read(chosen).contiguous()), self.labels[torch.from_numpy(chosen)]
        return replace(self, rows=rows, labels=labels, features=features)

    def plus(self, offset: np.ndarray) -> FitData:
        """The same samples with an offset (K,) added to their logits."""
        return replace(self, rows=self.rows.plus(torch.from_numpy(offset)))

    @cached_property
    def seen_counts(self) -> np.ndarray:
        """(K,) samples per class of the given set."""
        return np.bincount(self.labels.numpy(), minlength=self.num_classes)

    @cached_property
    def frequency(self) -> np.ndarray:
        """(K,) weight of a sample of each class, so that the given set represents the training set.

        With training counts n (sum N) and counts m (sum M) of the set, (n_c / N) / (m_c / M): 1 for the training
        set itself, however many views of it; other numbers where the set is balanced, curated, or a chosen few
        images per class. 0 for a class without samples.
        """
        share, own = self.class_counts / self.class_counts.sum(), self.seen_counts / len(self.labels)
        return np.divide(share, own, out=np.zeros(len(share)), where=own > 0)


def from_arrays(
    logits: Any,
    y: Any,
    *,
    class_counts: Any = None,
    weight_norms: Any = None,
    head_bias: Any = None,
    features: Any = None,
    need_every_class: bool = True,
    classes: np.ndarray | None = None,
) -> FitData:
    """Check arrays: logits (N, K), y (N,) and whatever else is known of the classifier."""
    array = as_logits(logits)
    labels, classes = as_labels(y, array.shape, classes)
    bias = None if head_bias is None else torch.from_numpy(vector(head_bias, array.shape[1], "head_bias"))
    inputs = None if features is None else as_features(features, len(labels))
    seen = np.bincount(labels.numpy(), minlength=array.shape[1])
    counts = seen if class_counts is None else as_counts(class_counts, array.shape[1])
    if need_every_class:
        require_every_class(seen, counts)
    norms = np.ones(array.shape[1]) if weight_norms is None else as_norms(weight_norms, array.shape[1])
    return FitData(LogitRows(array), labels, counts, norms, classes, features=inputs, bias=bias)


def from_outputs(outputs: Outputs, world: World = SINGLE_PROCESS, *, need_every_class: bool = True) -> FitData:
    """Check stored outputs of a model; the processes of `world` share the work on them."""
    rows = outputs.rows()
    check_rows(rows, world)
    labels, classes = as_labels(outputs.labels, rows.shape)
    if need_every_class:
        seen = np.bincount(labels.numpy(), minlength=rows.shape[1])
        require_every_class(seen, outputs.class_counts, outputs.class_names, outputs.split)
    weight = None if outputs.head_weight is None else torch.from_numpy(outputs.head_weight)
    bias = None if outputs.head_bias is None else torch.from_numpy(outputs.head_bias)
    return FitData(
        rows=rows,
        labels=labels,
        class_counts=outputs.class_counts,
        weight_norms=as_norms(outputs.weight_norms, rows.shape[1]),
        classes=classes,
        features=outputs.features,
        weight=weight,
        bias=bias,
        world=world,
        names=tuple(outputs.class_names),
    )
