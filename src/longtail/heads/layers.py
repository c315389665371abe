"""The classifier layer of a model: its name, its weights, sharded or not, and copies of the model with another one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

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


Layer = TypeVar("Layer", bound=nn.Module)


def weight_and_bias(layer: nn.Module, path: str = "") -> tuple[Tensor, Tensor | None]:
    """Weight (K, D) and bias (K,) in float64 on the CPU; sharded parameters are gathered."""
    weight = whole(cast(Tensor, layer.weight))
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        raise UserError(
            f"{path or 'the model'} has quantised weights ({type(weight).__name__} of {weight.dtype}); calibrate "
            "before quantising"
        )
    bias = None if layer.bias is None else whole(cast(Tensor, layer.bias)).cpu().double()
    return weight.cpu().double().flatten(1), bias


# Usual names of the classifier, the most reliable first.
USUAL_NAMES = (
    "head",
    "fc",
    "classifier",
    "heads",
    "score",
    "linear",
    "logits",
    "logits_proj",
    "output",
    "out",
    "last_linear",
)
ADAPTERS = ("lora_", "original_module")  # layers of an adapter, or layers that an adapter has replaced


class HeadName(str):
    """The path of a head, as `model.get_submodule` takes it.

    Attributes:
        sure: True if running a batch has shown it or the user has named it; otherwise it is a guess.
        found_by: how it was found, in a few words.
        layers: paths of all layers that produce the logits; more than one if heads are averaged.
    """

    sure: bool
    found_by: str
    layers: tuple[str, ...]

    def __new__(cls, path: str, found_by: str, *, sure: bool = False, layers: tuple[str, ...] = ()) -> HeadName:
        name = super().__new__(cls, path)
        name.sure, name.found_by, name.layers = sure, found_by, layers or (path,)
        return name


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(f"a model must be a torch.nn.Module, not {kind}")
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def guess_head(model: nn.Module, name: str | None = None) -> HeadName:
    """The last linear layer, found by its name and position without running the model.

    Tries `get_classifier()` of the model, then the usual names, then the last linear layer. Of several
    candidates it takes one that feeds no other.

    >>> guess_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    '2'
    """
    model = unwrap(model)
    layers = model.named_modules(remove_duplicate=False)  # a layer may have two names
    linears = {path: module for path, module in layers if isinstance(module, nn.Linear)}
    if name is not None:
        return HeadName(_named(model, name, linears), "the name given", sure=True)
    if not linears:
        kinds = sorted({type(module).__name__ for module in model.modules() if not list(module.children())})
        raise UserError(
            f"{type(model).__name__} has no nn.Linear to calibrate (its layers: {', '.join(kinds[:8])}); pass a batch "
            "to find out whether another layer is its head: find_head(model, batch=batch), calibrate(model, loader)"
        )
    if callable(getter := getattr(model, "get_classifier", None)):
        classifier = getter()
        for path, module in linears.items():
            if module is classifier:
                return HeadName(path, "get_classifier() of the model", sure=True)
    plain = [path for path in linears if not any(name.startswith(ADAPTERS) for name in path.split("."))]
    depth = _wrapper_depth(plain)
    groups = [[path for path in plain if path.split(".")[depth : depth + 1] == [usual]] for usual in USUAL_NAMES]
    ends = [_without_feeding([(path, linears[path]) for path in group])[-1][0] for group in groups if group]
    if ends:
        # `head.dense` feeds `classifier`, also where there are as many classes as features.
        last = [path for path, _ in _without_feeding([(path, linears[path]) for path in ends])]
        square = [path for path in last if linears[path].in_features == linears[path].out_features]
        return HeadName(max(square, key=plain.index) if last[0] in square else last[0], "its usual name")
    return HeadName((plain or list(linears))[-1], "its position: the last linear layer")


def _wrapper_depth(paths: list[str]) -> int:
    """Length of the common prefix of all paths: modules around the model, such as those of an adapter or Lightning."""
    names = [path.split(".")[:-1] for path in paths]
    depth = 0
    while names and all(len(one) > depth for one in names) and len({one[depth] for one in names}) == 1:
        if names[0][depth] in USUAL_NAMES:
            break
        depth += 1
    return depth


def _without_feeding(linears: list[tuple[str, nn.Linear]]) -> list[tuple[str, nn.Linear]]:
    """The layers whose output width is not the input width of another; all of them if that leaves none."""
    inputs = {layer.in_features for _, layer in linears if layer.in_features != layer.out_features}
    return [(path, layer) for path, layer in linears if layer.out_features not in inputs] or linears


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
    head = unwrap(model).get_submodule(guess_head(model, name))
    assert isinstance(head, nn.Linear)
    return head


def layer_of_zeros(kind: type[Layer], *sizes: int, device: Any = "cpu", **settings: Any) -> Layer:
    """A layer whose parameters are 0, made without drawing random numbers."""
    # torch's own `skip_init` imports SymPy, which takes half a second.
    layer = kind(*sizes, device="meta", **settings)
    for name, parameter in layer.named_parameters():
        setattr(layer, name, nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)))
    return layer


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with this weight (K, D) and bias (K,)."""
    classes, features = weight.shape
    where = {"device": weight.device, "dtype": weight.dtype}
    layer = layer_of_zeros(nn.Linear, features, classes, bias=bias is not None, **where)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def with_head(model: nn.Module, head: nn.Module, name: str | None = None) -> nn.Module:
    """A copy of the model with another layer as its head."""
    old = head_of(model, name)
    head.train(old.training)
    return with_layers(model, [old], [head])


def with_layers(model: nn.Module, old: Sequence[nn.Module], new: Sequence[nn.Module]) -> nn.Module:
    """A copy of the model in which new layers replace old ones."""
    # Every reference to an old layer, also a second one or one in a list, becomes a reference to the new one.
    plain = unwrap(model)
    try:
        return copy.deepcopy(plain, {id(one): other for one, other in zip(old, new, strict=True)})
    except Exception as error:  # code of the user's model
        raise UserError(
            f"{type(plain).__name__} cannot be copied with copy.deepcopy, and the calibrated model would be a copy "
            f"({type(error).__name__}: {str(error)[:80].splitlines()[0]}…); add the method after the model with "
            "longtail.attach"
        ) from error


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights: equal weights have equal hashes, whatever file they came from."""
    return hash_of(sorted(unwrap(model).state_dict().items(), key=itemgetter(0)))


def hash_of(named: Iterable[tuple[str, Any]]) -> str:
    """A hash of named tensors; other values are skipped."""
    digest = hashlib.sha256()
    for name, value in named:
        if not isinstance(value, Tensor):
            continue
        plain: Any = whole(value).cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(np.ascontiguousarray(plain.reshape(-1).view(torch.uint8).numpy()).data)
    return digest.hexdigest()
