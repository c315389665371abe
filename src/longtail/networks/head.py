"""The last linear layer of anybody's model: found, replaced, folded into."""

from __future__ import annotations

import copy
import hashlib
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import skip_init

from longtail.errors import UserError

# What people call the classifier, in the order in which they are believed.
USUAL_NAMES = ("head", "fc", "classifier", "linear", "logits", "output", "out", "last_linear")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def find_head(model: nn.Module, name: str | None = None) -> str:
    """The name of the last linear layer, as `model.get_submodule` takes it.

    Looks at the place the model names itself (`get_classifier()`), at the usual names, then at the
    last linear layer there is. Pass `name` if the model's classifier stands elsewhere. `extract` and
    `calibrate` do not rely on this: they take the layer that a batch shows the model to answer with.

    >>> find_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    '2'
    """
    model = unwrap(model)
    layers = model.named_modules(remove_duplicate=False)  # a layer may have two names
    linears = {path: module for path, module in layers if isinstance(module, nn.Linear)}
    if name is not None:
        return _named(model, name, linears)
    if not linears:
        kinds = sorted({type(module).__name__ for module in model.modules() if not list(module.children())})
        raise UserError(
            f"{type(model).__name__} has no nn.Linear to calibrate (its layers: {', '.join(kinds[:8])}); "
            "calibrate saved logits instead, or replace the last layer by an nn.Linear"
        )
    if callable(getter := getattr(model, "get_classifier", None)):
        own = getter()
        for path, module in linears.items():
            if module is own:
                return path
    for usual in USUAL_NAMES:
        below = [path for path in linears if path.split(".")[0] == usual]
        if below:
            return below[-1]
    return list(linears)[-1]


def _named(model: nn.Module, name: str, linears: dict[str, nn.Linear]) -> str:
    if name in linears:
        return name
    below = [path for path in linears if path.startswith(f"{name}.")]
    if below:
        return below[-1]
    raise UserError(
        f"{type(model).__name__} has no nn.Linear called {name!r}; its linear layers: {', '.join(list(linears)[-8:])}"
    )


def head_of(model: nn.Module, name: str | None = None) -> nn.Linear:
    """The last linear layer itself."""
    found = unwrap(model).get_submodule(find_head(model, name))
    assert isinstance(found, nn.Linear)
    return found


def new_linear(in_features: int, num_classes: int, *, bias: bool = True, **where: Any) -> nn.Linear:
    """A layer of zeros; nothing is drawn from the caller's random numbers. `where` is a device and a type."""
    layer = skip_init(nn.Linear, in_features, num_classes, bias, **where)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return cast(nn.Linear, layer)


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer of this weight (K, D) and bias (K,)."""
    classes, features = weight.shape
    layer = new_linear(features, classes, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def with_head(model: nn.Module, head: nn.Module, name: str | None = None) -> nn.Module:
    """A copy of the model with another layer as its head; the model is left as it is."""
    old = head_of(model, name)
    head.train(old.training)
    # Wherever the model refers to its head, be it twice or in a list, the copy refers to the new one.
    return copy.deepcopy(unwrap(model), {id(old): head})


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights: equal for equal weights, whatever file they came from."""
    digest = hashlib.sha256()
    for name, value in sorted(unwrap(model).state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        plain: Any = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(np.ascontiguousarray(plain.reshape(-1).view(torch.uint8).numpy()).data)
    return digest.hexdigest()
