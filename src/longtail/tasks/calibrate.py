"""Calibrating anybody's model with its loader: extract once, fit, put the answer back as its head."""

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
from longtail.networks.head_folding import folded_layers
from longtail.networks.head_search import Head, close, is_exact
from longtail.networks.sharded import refuse_copies_of_fsdp
from longtail.outputs.writer import Rows
from longtail.posthoc.base import PostHoc, chosen_images, fit_outputs, warn_if_all_is_known
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
    """Calibrate a trained model: (a new model of the same class, the fitted method).

    Wrappers (DistributedDataParallel, DataParallel, torch.compile) are taken off the new model.

    Args:
        model: a classifier whose last layer is an `nn.Linear`; it is left as it is.
        loader: batches of its training set, as `extract` takes them; augmented as in training if you can.
        method: what to fit (default: `MARC()`), or its name in `longtail methods`, such as "auto".
        validation: batches of held-out images, for settings chosen on them and for confidence methods.
        head: name of the last linear layer; without, it is the one whose output the model gives.
        class_counts: (K,) training samples per class, if the loader does not show all of them.
        device: where to run the model.
        images_per_class: at most so many samples of every class are read and run, "auto" for as many as the method
            needs. The loader must be a data set that knows its labels, or a `DataLoader` of one.
        seed: decides which samples these are.
        progress: show how far it is, in a terminal or a notebook.
    """
    method = build_posthoc(method or "marc", {}) if method is None or isinstance(method, str) else method
    display = Display(quiet=not progress)
    method.check_settings()
    part = None
    if images_per_class != "all":
        few = chosen_images(images_per_class, method, np.bincount(known_labels(loader)), seed)
        loader, part = (loader, None) if few is None else few_of(loader, few)
    orders = [order_of(one) for one in (loader, validation) if one is not None]
    with running(model, device, shards=max(order.shards for order in orders)) as ready:
        refuse_copies_of_fsdp(ready.model)
        rows = Rows(np.dtype(np.float32))
        check = partial(_require_foldable, method, ready.model)
        seen = run_over(ready, loader, rows, head=head, check=check, display=display)
        train = Gathered(ready, rows.joined(), orders[0], seen.head, class_counts, "train", part).outputs()
        held_out = None
        if validation is not None:
            rows = Rows(np.dtype(np.float32))
            run_over(ready, validation, rows, known=seen.head, display=display)
            counts = train.class_counts
            held_out = Gathered(ready, rows.joined(), orders[1], seen.head, counts, "validation").outputs()
        with torch.enable_grad():  # some methods train
            fit_outputs(method, train, held_out, ready.world)
            if ready.world.is_main:
                warn_if_all_is_known(method, train)
        return _folded(ready, seen, method), method


def _require_foldable(method: PostHoc, model: nn.Module, head: Head) -> None:
    """Refuse before the pass over the data what would be refused after it."""
    if head.obstacle:
        raise UserError(
            f"nothing folds into {type(model).__name__}: {head.obstacle}. Put the method behind the model: {ATTACH}"
        )
    if method.needs_features and not head.has_features:
        raise UserError(
            f"{type(method).__name__} needs the features before the head, one vector per sample, and "
            f"{', '.join(head.layers)} of {type(model).__name__} sees something else; choose a method that works on "
            "logits, such as MARC"
        )


def _folded(ready: Running, seen: Pass, method: PostHoc) -> nn.Module:
    """A copy of the model with the method in its weights, once it answers as the method says."""
    model, head = ready.model, seen.head
    old = [model.get_submodule(path) for path in head.layers]
    calibrated = with_layers(model, old, folded_layers(method.head, old, head.gains))
    with random_state_kept():
        before = read(model, head, seen.few)
    with random_state_kept():
        after = head.place.read(calibrated(*seen.few.inputs, **seen.few.named))
    expected = head.formed(method.transform(before.logits, before.features))
    exact = all(is_exact(cast(Tensor, numbers)) for numbers in (before.logits, *(layer.weight for layer in old)))
    if not close(after.cpu().double(), expected.cpu().double(), 1e-3 if exact else 0.05):
        raise UserError(
            f"{type(method).__name__} does not fold into {', '.join(head.layers)} of {type(model).__name__}: the model "
            f"would not answer as the method says. Put the method behind the model: {ATTACH}"
        )
    return ready.restored(calibrated)
