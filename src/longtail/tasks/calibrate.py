"""Calibrating anybody's model with its loader: extract once, fit, put the answer back as its head."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
from torch import nn

from longtail.backbones.inference import evaluating
from longtail.core.progress import Display
from longtail.extraction.model import extract, extract_with_head
from longtail.networks.head import head_of, unwrap, with_head
from longtail.outputs.writer import Rows
from longtail.posthoc.base import PostHoc, fit_outputs
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
    progress: bool = True,
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
    progress: bool = True,
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
        progress: show how far it is, in a terminal or a notebook.
    """
    method = MARC() if method is None else method
    display, rows = Display(quiet=not progress), Rows(np.dtype(np.float32))
    shown: dict[str, Any] = {"device": device, "display": display}
    train, head = extract_with_head(model, loader, rows, head=head, class_counts=class_counts, **shown)
    held_out = None
    if validation is not None:
        counts = train.class_counts
        held_out = extract(model, validation, head=head, class_counts=counts, split="validation", **shown)
    fit_outputs(method, train, held_out)
    with evaluating(unwrap(model)):  # where reading a weight computes it, that must not change it
        calibrated = method.head(head_of(model, head))
    return with_head(model, calibrated, head), method
