"""Adds a fitted method after any model, if it cannot be folded into a layer."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.heads.attach import Attached, ScaleShift
from longtail.heads.layers import linear_layer
from longtail.outputs.batches import split_batch
from longtail.outputs.inference import detect_head, inference_session
from longtail.posthoc.base import PostHoc
from longtail.posthoc.scale_and_shift import AffinePostHoc


class Applied(nn.Module):
    """A method of the user as a module: logits (N, K) to calibrated logits (N, K)."""

    def __init__(self, method: PostHoc) -> None:
        super().__init__()
        self.method = method

    def forward(self, logits: Tensor) -> Tensor:
        return self.method._apply(logits, None)


def attach(model: nn.Module, method: PostHoc, *, batch: Any = None) -> Attached:
    """The model followed by a fitted method: called like the model, it returns calibrated logits.

    Use it for models into which a calibration cannot be folded; use `calibrate` for all others. The model is not
    copied.

    Args:
        model: returns logits (N, K), or an object that holds them.
        method: fitted on the logits of this model: `method.fit(longtail.extract(model, loader))`.
        batch: a batch of the loader; needed if it is not clear where the logits are in the output.

    >>> from longtail.posthoc.marc import MARC
    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 1.0], [1.5, 1.0], [1.0, 0.8]])
    >>> method = MARC().fit(logits, [0, 0, 0, 1])
    >>> attach(nn.Identity(), method)(logits).argmax(1).tolist()
    [0, 0, 0, 1]
    """
    check_is_fitted(method)
    classes = method.n_features_in_
    layer = _layer_of(method, classes)
    path = None
    if batch is not None:
        with inference_session(model, "auto", alone=True) as session:
            head = detect_head(session.model, split_batch(batch, session.model, session.device))
        if head.form != "logits":
            raise UserError(
                f"{type(session.model).__name__} returns the {head.form} of the output of {head.layers[0]}; "
                "use longtail.calibrate, which folds the method into that layer"
            )
        path = head.path
    attached = Attached(model, layer, classes, path)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    attached.calibration.to(device).requires_grad_(False).train(model.training)
    return attached


def _layer_of(method: PostHoc, classes: int) -> nn.Module:
    """The method as a layer on logits; raises if the layer and the method differ on some logits."""
    some = torch.linspace(-3, 3, 4 * classes).view(4, classes)
    try:
        expected = torch.as_tensor(method.transform(some))
    except UserError as error:
        raise UserError(
            f"an attached method sees only logits ({error}); fit it on logits, method.fit(outputs.logits, "
            "outputs.labels), or choose a method that works on logits, such as MARC"
        ) from error
    layer = _module_of(method, classes)
    with torch.no_grad():
        if not torch.allclose(layer(some).double(), expected.double(), rtol=1e-3, atol=1e-3):
            raise UserError(f"{type(method).__name__} as a layer does not give the same logits as its transform")
    return layer


def _module_of(method: PostHoc, classes: int) -> nn.Module:
    if isinstance(method, AffinePostHoc):
        return ScaleShift(torch.as_tensor(method.scale_), torch.as_tensor(method.shift_))
    if type(method).fold is PostHoc.fold and type(method).head is PostHoc.head:
        return Applied(method)
    return method.head(linear_layer(torch.eye(classes), torch.zeros(classes)))
