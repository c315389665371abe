"""Sharded parameters: `DTensor`, and models wrapped by FSDP."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from longtail.errors import UserError

HOW_TO_GO_ON = (
    "gather its weights into a plain model and calibrate that, or fit the method on "
    "longtail.extract(model, loader) and add it after the model with longtail.attach(model, method)"
)


def whole(tensor: Tensor) -> Tensor:
    """A detached tensor; a sharded one is gathered."""
    tensor = tensor.detach()
    gathered: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return gathered


def runs_together(model: nn.Module) -> bool:
    """Whether a forward pass makes collective calls, so that all processes must run it."""
    return is_fsdp(model) or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def is_fsdp(model: nn.Module) -> bool:
    """Whether a part of the model is wrapped by FSDP, of version 1 or 2."""
    names = ("FullyShardedDataParallel", "FSDPModule")
    return any(kind.__name__ in names for module in model.modules() for kind in type(module).__mro__)


def refuse_copies_of_fsdp(model: nn.Module) -> None:
    """Refuse FSDP models: they cannot be copied, so a calibrated copy cannot be returned."""
    if is_fsdp(model):
        raise UserError(f"{type(model).__name__} is wrapped by FSDP, which cannot be copied; {HOW_TO_GO_ON}")


def scattered(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A copy of a layer whose weight is a `DTensor`, with new values and the same placements."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    new = copy.deepcopy(layer)
    old: Any = layer.weight
    # A bias is sharded like the rows of the weight; where columns are sharded, it is replicated.
    of_bias = [one if one.is_shard(0) else Replicate() for one in old.placements]
    placements = {"weight": old.placements, "bias": getattr(layer.bias, "placements", of_bias)}
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            values = value.to(old.to_local().device, old.dtype)
            sharded = distribute_tensor(values, old.device_mesh, placements[name])
            setattr(new, name, nn.Parameter(sharded, requires_grad=old.requires_grad))
    return new
