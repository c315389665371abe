"""Putting a fitted method behind anybody's model, where it does not fold into a layer."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.extraction.batches import split_batch
from longtail.extraction.reader import find
from longtail.extraction.running import running
from longtail.networks.attached import Attached, ScaleShift
from longtail.networks.head import linear_layer
from longtail.posthoc.base import AffinePostHoc, PostHoc


class Applied(nn.Module):
    """A method of somebody else's as a module: logits (N, K) to calibrated logits (N, K)."""

    def __init__(self, method: PostHoc) -> None:
        super().__init__()
        self.method = method

    def forward(self, logits: Tensor) -> Tensor:
        return self.method._apply(logits, None)


def attach(model: nn.Module, method: PostHoc, *, batch: Any = None) -> Attached:
    """The model with a fitted method behind it: called as before, it answers with calibrated logits.

    For models whose head nothing folds into; `calibrate` is for all others. The model is not copied.

    Args:
        model: answers with logits (N, K), or with something that holds them.
        method: fitted on the logits that the model answers with: `method.fit(longtail.extract(model, loader))`.
        batch: what a loader gives; it shows where in the answer the logits stand, if that is not plain.

    >>> from longtail.posthoc.marc import MARC
    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 1.0], [1.5, 1.0], [1.0, 0.8]])
    >>> method = MARC().fit(logits, [0, 0, 0, 1])
    >>> attach(nn.Identity(), method)(logits).argmax(1).tolist()
    [0, 0, 0, 1]
    """
    check_is_fitted(method)
    classes = method.n_features_in_
    layer = _layer_of(method, classes)
    place = None
    if batch is not None:
        with running(model, "auto", alone=True) as ready:
            head = find(ready.model, split_batch(batch, ready.model, ready.device))
        if head.form != "logits":
            raise UserError(
                f"{type(ready.model).__name__} answers with the {head.form} of what {head.layers[0]} gives; "
                "longtail.calibrate folds the method into that layer"
            )
        place = head.place
    attached = Attached(model, layer, classes, place)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    attached.calibration.to(device).requires_grad_(False).train(model.training)
    return attached


def _layer_of(method: PostHoc, classes: int) -> nn.Module:
    """The method as a layer of logits; an error unless it does to some of them what the method does."""
    some = torch.linspace(-3, 3, 4 * classes).view(4, classes)
    try:
        expected = torch.as_tensor(method.transform(some))
    except UserError as error:
        raise UserError(
            f"behind a model there are logits only ({error}); fit the method on them alone, method.fit(outputs.logits, "
            "outputs.labels), or choose one that works on them, such as MARC"
        ) from error
    layer = _made(method, classes)
    with torch.no_grad():
        if not torch.allclose(layer(some).double(), expected.double(), rtol=1e-3, atol=1e-3):
            raise UserError(f"{type(method).__name__} as a layer does not give what it gives by itself")
    return layer


def _made(method: PostHoc, classes: int) -> nn.Module:
    if isinstance(method, AffinePostHoc):
        return ScaleShift(torch.as_tensor(method.scale_), torch.as_tensor(method.shift_))
    if type(method).fold is PostHoc.fold and type(method).head is PostHoc.head:
        return Applied(method)
    return method.head(linear_layer(torch.eye(classes), torch.zeros(classes)))
