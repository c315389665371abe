"""Input of a post-hoc fit: arrays or stored outputs are checked, subsampled and given to a method."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from longtail.data.imbalance import ClassSubsample
from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError, choose
from longtail.outputs.checks import (
    Array,
    as_counts,
    as_features,
    as_labels,
    as_logits,
    as_norms,
    check_rows,
    refuse_beside_outputs,
    require_every_class,
    vector,
)
from longtail.outputs.record import Outputs
from longtail.outputs.rows import LogitRows
from longtail.posthoc.gate import check_fit_inputs
from longtail.posthoc.held_out import compared_with_training

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc

CHECKED_FOR_ERRORS = 20_000  # training samples on which the model's accuracy is measured
NEARLY_PERFECT = 0.99  # accuracy
TOO_SURE = "a head fitted on these features is too sure on new images: use HALO (--method halo)"


@dataclass(frozen=True)
class FitData:
    """Checked input of a fit.

    Args:
        rows: logits (N, K).
        labels: (N,) int64 in 0..K-1.
        class_counts: (K,) training samples per class.
        weight_norms: (K,) norms of the head's class vectors; 1 where only logits are given.
        classes: (K,) the user's labels of the classes.
        features: (N, D), if given.
        weight: (K, D) of the head, if given.
        bias: (K,) of the head, if given.
        world: processes that share the work; each of them can read all of the data.
        names: (K,) of the classes in files, where they differ from `classes`.
        seen: whether held-out samples turned out to be training samples.
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
    seen: bool = False

    @property
    def num_classes(self) -> int:
        return self.rows.shape[1]

    @property
    def class_names(self) -> tuple[str, ...]:
        """(K,) names of the classes in files."""
        return self.names or tuple(str(name) for name in self.classes)

    def subset(self, chosen: np.ndarray) -> FitData:
        """The samples of these indices."""
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
        set itself, however many views of it; other numbers where the set is balanced, curated, or a subsample of
        every class. 0 for a class without samples.
        """
        wanted, present = self.class_counts / self.class_counts.sum(), self.seen_counts / len(self.labels)
        return np.divide(wanted, present, out=np.zeros(len(wanted)), where=present > 0)


def as_fit_data(
    logits: Any,
    y: Any = None,
    *,
    need_every_class: bool = True,
    check_logits: bool = True,
    classes: np.ndarray | None = None,
    world: World = SINGLE_PROCESS,
    **arrays: Any,
) -> FitData:
    """Checked input from `Outputs`, or from logits (N, K), y (N,) and the other arrays of `PostHoc.fit`."""
    if isinstance(logits, Outputs):
        refuse_beside_outputs(y=y, **arrays)
        data = from_outputs(logits, world, need_every_class=need_every_class)
    else:
        data = from_arrays(logits, y, need_every_class=need_every_class, classes=classes, **arrays)
    if check_logits:
        check_fit_inputs(data)
    return data


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
    """Check arrays: logits (N, K), y (N,) and what else is given of the classifier."""
    array = as_logits(logits)
    labels, classes = as_labels(y, array.shape, classes)
    bias = None if head_bias is None else torch.from_numpy(vector(head_bias, array.shape[1], "head_bias"))
    inputs = None if features is None else as_features(features, len(labels))
    seen = np.bincount(labels.numpy(), minlength=array.shape[1])
    counts = seen if class_counts is None else as_counts(class_counts, array.shape[1])
    if need_every_class:
        require_every_class(seen, "labels")
        require_every_class(counts)
    norms = np.ones(array.shape[1]) if weight_norms is None else as_norms(weight_norms, array.shape[1])
    return FitData(LogitRows(array), labels, counts, norms, classes, features=inputs, bias=bias)


def from_outputs(outputs: Outputs, world: World = SINGLE_PROCESS, *, need_every_class: bool = True) -> FitData:
    """Check stored outputs of a model; the processes of `world` share the work on them."""
    rows = outputs.rows()
    check_rows(rows, world)
    labels, classes = as_labels(outputs.labels, rows.shape)
    if need_every_class:
        seen = np.bincount(labels.numpy(), minlength=rows.shape[1])
        require_every_class(seen, f"labels of {outputs.split}", outputs.class_names)
        require_every_class(outputs.class_counts, names=outputs.class_names)
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


def require_features(features: Array | None, method: PostHoc, width: int | None = None) -> Array:
    """The features, as many per sample as in the fit, or an error that explains how to give them."""
    if features is None:
        raise UserError(
            f"{type(method).__name__} needs features (N, D): pass Outputs that have them, or features=…; "
            "in a file of saved logits, an array called features"
        )
    if width is not None and features.shape[1] != width:
        raise UserError(f"{type(method).__name__} was fitted on {width} features per sample, not {features.shape[1]}")
    return features


def fit_outputs(
    method: PostHoc, train: Outputs | None, validation: Outputs | None, world: World = SINGLE_PROCESS
) -> None:
    """Fit a method, whose settings were checked, on stored outputs; the processes of `world` share the work.

    A method that must not see training images is fitted on the validation outputs.
    """
    needed, check = method.needs_every_class, partial(as_fit_data, world=world, check_logits=method.reads_logits)
    held_out = None
    if validation is not None:
        held_out = check(validation, need_every_class=needed and method.fitted_on_unseen)
    if method.fitted_on_unseen:
        if held_out is None:
            raise UserError(
                f"{type(method).__name__} must be fitted on images that the network has not seen, but there are none: "
                "hold out images in training (--validation 0.1) or give held-out outputs (--validation FILE)"
            )
        if train is not None:
            compared_with_training(from_outputs(train, world, need_every_class=False), held_out, refuse=True)
        method.fit_checked(held_out, None)
        return
    assert train is not None
    data = check(train, need_every_class=needed)
    if held_out is not None:
        refuse = method.refuses_seen or method.chooses_a_setting
        held_out = compared_with_training(data, held_out, refuse=refuse)
    method.fit_checked(data, held_out)


def warn_if_no_errors(method: PostHoc, train: Outputs | None) -> None:
    """Warn if the model makes no errors on the training images that a method is fitted on."""
    if train is None or train.split != "train" or method.fitted_on_unseen:
        return
    if not method.learns_from_seen and not method.for_frozen:
        return
    subsample = np.linspace(0, len(train) - 1, min(len(train), CHECKED_FOR_ERRORS)).astype(int)
    rows, labels, chunks = train.rows(), train.labels[subsample], np.array_split(subsample, min(len(subsample), 10))
    hits = np.concatenate([rows.read(chunk).argmax(1).numpy() for chunk in chunks]) == labels
    present = np.unique(labels)
    accuracy = (np.bincount(labels, hits)[present] / np.bincount(labels)[present]).mean()
    if accuracy < NEARLY_PERFECT:
        return
    classified = f"the model has a balanced accuracy of {100 * accuracy:.1f} % on the training images"
    if method.for_frozen:
        message = f"{classified}; if its backbone was trained on them, {TOO_SURE}"
    else:
        message = (
            f"{classified}, so {type(method).__name__} can learn little about errors on new images; hold out images, "
            "use HALO (--method halo)"
        )
    warnings.warn(message, stacklevel=2)


def chosen_images(choice: int | str, method: PostHoc, class_counts: np.ndarray, seed: int = 0) -> ClassSubsample | None:
    """Which training images a method is fitted on: a number per class, "all" or "auto"; None for all of them.

    "auto" takes `method.enough_images`; if no class has more images, all are taken.
    """
    if isinstance(choice, str):
        choose("images_per_class", choice, ("all", "auto"))
        most = method.enough_images(len(class_counts)) if choice == "auto" else None
    else:
        most = choice
    if most is None:
        return None
    subsample = ClassSubsample(most, seed)
    return subsample if subsample.most < class_counts.max() else None
