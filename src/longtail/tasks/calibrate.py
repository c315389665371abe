"""Calibrates any model with its loader: extract once, fit, fold the result into the head."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor, nn

from longtail.core.progress import Display
from longtail.core.random_state import random_state_kept
from longtail.errors import UserError
from longtail.extraction.loaders import order_of
from longtail.extraction.model import Gathered, Pass, run_over
from longtail.extraction.reader import read
from longtail.extraction.running import Running, running
from longtail.extraction.selection import few_of, known_labels
from longtail.methods import build_posthoc
from longtail.networks.head import with_layers
from longtail.networks.head_account import alike, is_exact
from longtail.networks.head_folding import folded_layers
from longtail.networks.head_search import Head
from longtail.networks.sharded import refuse_copies_of_fsdp, whole
from longtail.outputs.writer import Rows
from longtail.posthoc.base import PostHoc
from longtail.posthoc.fitting import chosen_images, fit_outputs, warn_if_all_is_known
from longtail.posthoc.marc import MARC

ATTACH = "method.fit(longtail.extract(model, loader)); model = longtail.attach(model, method)"

Model = TypeVar("Model", bound=nn.Module)
Method = TypeVar("Method", bound=PostHoc)


@overload
def calibrate(
    model: Model,
    loader: Any,
    method: None = None,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
    images_per_class: int | Literal["all", "auto"] = "all",
    seed: int = 0,
    progress: bool = True,
) -> tuple[Model, MARC]: ...


@overload
def calibrate(
    model: Model,
    loader: Any,
    method: Method,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
    images_per_class: int | Literal["all", "auto"] = "all",
    seed: int = 0,
    progress: bool = True,
) -> tuple[Model, Method]: ...


@overload
def calibrate(
    model: Model,
    loader: Any,
    method: str,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
    images_per_class: int | Literal["all", "auto"] = "all",
    seed: int = 0,
    progress: bool = True,
) -> tuple[Model, PostHoc]: ...


def calibrate(
    model: nn.Module,
    loader: Any,
    method: PostHoc | str | None = None,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
    images_per_class: int | Literal["all", "auto"] = "all",
    seed: int = 0,
    progress: bool = True,
) -> tuple[nn.Module, PostHoc]:
    """Calibrate a trained model; returns a new model of the same class, and the fitted method.

    The new model has no wrappers (DistributedDataParallel, DataParallel, torch.compile).

    Args:
        model: a classifier whose last layer is an `nn.Linear`; it is not changed.
        loader: batches of its training set, as for `extract`; augmented as in training if you can.
        method: the method to fit (default: `MARC()`), or its name in `longtail methods`, such as "auto".
        validation: batches of held-out images, on which hyper-parameters are chosen and confidence methods fitted.
        head: name of the last linear layer; by default it is found by running the model.
        class_counts: (K,) training samples per class, if the loader does not contain all of them.
        device: where to run the model.
        images_per_class: at most so many samples of every class are read and run, "auto" for as many as the method
            needs. The loader must be a data set with a list of its labels, or a `DataLoader` of one.
        seed: random seed that selects these samples.
        progress: show a progress bar, in a terminal or a notebook.
    """
    method = build_posthoc(method or "marc", {}) if method is None or isinstance(method, str) else method
    display = Display(quiet=not progress)
    method.check_settings()
    part = None
    if images_per_class != "all":
        labels = known_labels(loader)
        few = chosen_images(images_per_class, method, np.bincount(labels), seed)
        loader, part = (loader, None) if few is None else few_of(loader, few, labels)
    orders = [order_of(one) for one in (loader, validation)[: 1 if validation is None else 2]]
    with running(model, device, shards=max(order.shards for order in orders)) as ready:
        refuse_copies_of_fsdp(ready.model)
        rows = Rows(np.dtype(np.float32))
        check = partial(_require_foldable, method, ready.model)
        seen = run_over(ready, loader, rows, head=head, check=check, display=display)
        train = Gathered(ready, rows.joined(), orders[0], seen.head, class_counts, "train", part).outputs()
        held_out = None
        if validation is not None:
            rows = Rows(np.dtype(np.float32))
            run_over(ready, validation, rows, known=seen.head, check=check, display=display)
            counts = train.class_counts
            held_out = Gathered(ready, rows.joined(), orders[1], seen.head, counts, "validation").outputs()
        with torch.enable_grad():  # some methods train
            fit_outputs(method, train, held_out, ready.world)
            if ready.world.is_main:
                warn_if_all_is_known(method, train)
        return _folded(ready, seen, method), method


def _require_foldable(method: PostHoc, model: nn.Module, head: Head) -> None:
    """Refuse, before the pass over the data, models and methods that do not fit together."""
    if head.obstacle:
        raise UserError(
            f"a calibration cannot be folded into {type(model).__name__}: {head.obstacle}. Add the method after the "
            f"model: {ATTACH}"
        )
    if method.needs_features and not head.has_features:
        raise UserError(
            f"{type(method).__name__} needs the features before the head, one vector per sample, but the input of "
            f"{', '.join(head.layers)} of {type(model).__name__} has another form; choose a method that works on "
            "logits, such as MARC"
        )


def _folded(ready: Running, seen: Pass, method: PostHoc) -> nn.Module:
    """A copy of the model with the method folded into its weights; raises if its logits are not the method's."""
    model, head = ready.model, seen.head
    old = [model.get_submodule(path) for path in head.layers]
    calibrated = with_layers(model, old, folded_layers(method.head, old, head.gains))
    for few in seen.few:
        with random_state_kept():
            before = read(model, head, few)
        with random_state_kept():
            after = whole(head.place.read(calibrated(*few.inputs, **few.named)))
        expected = head.formed(method.transform(before.logits, before.features))
        exact = all(is_exact(cast(Tensor, numbers)) for numbers in (before.logits, *(layer.weight for layer in old)))
        if not alike(after.cpu().double(), expected.cpu().double(), exact=exact):
            raise UserError(
                f"{type(method).__name__} cannot be folded into {', '.join(head.layers)} of {type(model).__name__}: "
                f"the new model would not give the logits of the method. Add the method after the model: {ATTACH}"
            )
    return ready.restored(calibrated)
