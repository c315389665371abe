"""Calibrating anybody's model with its loader: extract once, fit, put the answer back as its head."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

import numpy as np
from torch import nn

from longtail.backbones.inference import evaluating
from longtail.extraction.model import extract, extract_with_head
from longtail.extraction.selection import known_labels
from longtail.networks.head import head_of, unwrap, with_head
from longtail.outputs.writer import Rows
from longtail.posthoc.base import PostHoc, chosen_images, fit_outputs
from longtail.posthoc.marc import MARC

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
) -> tuple[Model, Method]: ...


def calibrate(
    model: nn.Module,
    loader: Any,
    method: PostHoc | None = None,
    *,
    validation: Any = None,
    head: str | None = None,
    class_counts: Any = None,
    device: str = "auto",
    images_per_class: int | Literal["all", "auto"] = "all",
    seed: int = 0,
) -> tuple[nn.Module, PostHoc]:
    """Calibrate a trained model: (a new model of the same class, the fitted method).

    Wrappers (DistributedDataParallel, DataParallel, torch.compile) are taken off the new model.

    Args:
        model: a classifier whose last layer is an `nn.Linear`; it is left as it is.
        loader: batches of its training set, as `extract` takes them; augmented as in training if you can.
        method: what to fit (default: `MARC()`).
        validation: batches of held-out images, for settings chosen on them and for confidence methods.
        head: name of the last linear layer; without, it is the one whose output the model gives.
        class_counts: (K,) training samples per class, if the loader does not show all of them.
        device: where to run the model.
        images_per_class: at most so many samples of every class are read and run, "auto" for as many as the method
            needs. The loader must be a data set that knows its labels, or a `DataLoader` of one.
        seed: decides which samples these are.
    """
    method = MARC() if method is None else method
    few = None
    if images_per_class != "all":
        few = chosen_images(images_per_class, method, np.bincount(known_labels(loader)), seed)
    rows = Rows(np.dtype(np.float32))
    train, head = extract_with_head(model, loader, rows, head=head, class_counts=class_counts, device=device, few=few)
    held_out = None
    if validation is not None:
        counts = train.class_counts
        held_out = extract(model, validation, head=head, class_counts=counts, split="validation", device=device)
    fit_outputs(method, train, held_out)
    with evaluating(unwrap(model)):  # where reading a weight computes it, that must not change it
        calibrated = method.head(head_of(model, head))
    return with_head(model, calibrated, head), method
