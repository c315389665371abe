"""Records the layers that produce the logits of a model, and folds a calibration into them.

A linear layer or a convolution computes `W x + b`. If the logits are `sum_i gain_i * output_i` (two averaged heads, an
ensemble, a factor at the end; each output can be a mean over tokens or positions), they equal the output of one linear
layer whose weight is the concatenation of `gain_i * W_i`. The calibration is folded into that layer, and the result is
split into the original layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from longtail.errors import UserError

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTION_SETTINGS: tuple[str, ...] = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
CONVOLUTION_SETTINGS += ("groups", "padding_mode")
MakeHead = Callable[[nn.Linear], nn.Module]
Calls = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # path of a layer → (input, output) of each time that it ran


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


def gathered(tensor: Tensor) -> Tensor:
    """A detached tensor; a `DTensor` is gathered from all processes."""
    tensor = tensor.detach()
    full: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return full


def weight_and_bias(layer: nn.Module, path: str = "") -> tuple[Tensor, Tensor | None]:
    """Weight (K, D) and bias (K,) in float64 on the CPU."""
    weight = gathered(cast(Tensor, layer.weight))
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        raise UserError(
            f"{path or 'the model'} has quantised weights ({type(weight).__name__} of {weight.dtype}); calibrate "
            "before quantising"
        )
    bias = None if layer.bias is None else gathered(cast(Tensor, layer.bias)).cpu().double()
    return weight.cpu().double().flatten(1), bias


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with a copy of this weight (K, D) and bias (K,)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")  # draws no random numbers
    layer.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(weight, copy=True))
    return layer


def _same_kind(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A linear layer or convolution with the settings of `layer`, this weight (K, D) and bias (K,)."""
    linear = linear_layer(weight, bias)
    if isinstance(layer, nn.Linear):
        return linear
    kind = next(kind for kind in LAYERS if isinstance(layer, kind))
    settings = {name: getattr(layer, name) for name in CONVOLUTION_SETTINGS}
    convolution = kind(**settings, bias=bias is not None, device="meta")
    convolution.weight = nn.Parameter(linear.weight.detach().view(convolution.weight.shape))
    convolution.bias = linear.bias
    return convolution


@contextmanager
def recording(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Collect (input, output) of layers each time they run; the classes are the last dimension of an output."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in layers}

    def record(path: str, layer: nn.Module, inputs: Any, named: dict[str, Tensor], output: Tensor) -> None:
        # Copies: the model may change a tensor in place, and a view would keep its whole base in memory.
        (features,) = inputs or (named["input"],)
        output = gathered(output).movedim(-1 if isinstance(layer, nn.Linear) else 1, -1)
        calls[path].append((gathered(features).clone(), output.clone()))

    with ExitStack() as stack:
        for path, layer in layers.items():
            stack.callback(layer.register_forward_hook(partial(record, path), with_kwargs=True).remove)
        yield calls


@contextmanager
def changed(layers: Sequence[nn.Module], scale: Tensor, shift: Tensor) -> Iterator[None]:
    """Inside the block the layers return `scale * output + shift`, with a scale (K,) and a shift (K,)."""

    def change(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        shape = (-1,) if isinstance(layer, nn.Linear) else (-1, *[1] * (output.ndim - 2))
        factor, term = (values.to(output.device, output.dtype).view(shape) for values in (scale, shift))
        return output * factor + term

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(change).remove)
        yield


def why_not_linear(layer: nn.Module, path: str, calls: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Why a layer that gave these (input, output) does not compute `W x + b`; empty if it does."""
    try:
        plain = _same_kind(layer, *weight_and_bias(layer, path))
    except UserError as error:
        return str(error)
    exact = all(value.dtype in (torch.float32, torch.float64) for value in (cast(Tensor, layer.weight), calls[0][1]))
    for features, output in calls:
        expected = plain(features.cpu().double()).movedim(-1 if isinstance(layer, nn.Linear) else 1, -1)
        if float((output.cpu() - expected).abs().max()) > (1e-2 if exact else 0.1) * float(expected.abs().max()):
            return (
                f"{path or 'the model'} ({type(layer).__name__}) does not compute weight times input plus bias "
                "(it may be a cosine head)"
            )
    return ""


def joined_head(layers: Sequence[nn.Module], gains: Sequence[float]) -> nn.Linear:
    """One linear layer with the same output: weights concatenated, biases summed, in float64."""
    parts = [weight_and_bias(layer) for layer in layers]
    weight = torch.cat([gain * part for gain, (part, _) in zip(gains, parts, strict=True)], 1)
    biases = [gain * bias for gain, (_, bias) in zip(gains, parts, strict=True) if bias is not None]
    return linear_layer(weight, torch.stack(biases).sum(0) if biases else None)


def folded_layers(make_head: MakeHead, layers: Sequence[nn.Module], gains: Sequence[float]) -> list[nn.Module]:
    """Layers that replace the old ones and give the output of `make_head(joined_head(layers, gains))`."""
    joined = joined_head(layers, gains)
    made = make_head(joined)
    if not isinstance(made, nn.Linear):
        if len(layers) > 1 or gains[0] != 1 or not isinstance(layers[0], nn.Linear):
            raise UserError(
                f"a {type(made).__name__} replaces one linear layer, but several layers produce the output of this "
                "model; add the method after the model with longtail.attach"
            )
        return [_like(made, layers[0])]
    parts = [weight_and_bias(layer) for layer in layers]
    weights = made.weight.detach().split([weight.shape[1] for weight, _ in parts], 1)
    # Layers without a bias stay without one if another has it: an adapter would lose its bias when it is merged.
    biased = [number for number, (_, bias) in enumerate(parts) if bias is not None] or [0]
    total = sum(gains[number] for number in biased)
    new: list[nn.Module] = []
    for number, (layer, gain) in enumerate(zip(layers, gains, strict=True)):
        bias = parts[number][1]
        if number in biased:  # the new bias is affine in the old one: these sum to that of the joined layer
            alone = linear_layer(joined.weight, None if bias is None else total * bias)
            bias = cast(nn.Linear, make_head(alone)).bias.detach() / total
        weight = weights[number] / gain
        if hasattr(layer.weight, "full_tensor"):
            new.append(_scattered(layer, weight.view(cast(Tensor, layer.weight).shape), bias))
        else:
            new.append(_like(_same_kind(layer, weight, bias), layer))
    return new


def _like(new: nn.Module, old: nn.Module) -> nn.Module:
    """The new layer with the dtype, device, mode and `requires_grad` of the old one."""
    weight = cast(Tensor, old.weight)
    trained = any(parameter.requires_grad for parameter in old.parameters())
    return new.to(weight.device, weight.dtype).requires_grad_(trained).train(old.training)


def _scattered(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
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


def with_two_rows(linear: nn.Linear) -> nn.Linear:
    """The layer with two logits (-z / 2, z / 2) in place of one logit z."""
    bias = None if linear.bias is None else torch.cat([-linear.bias, linear.bias]) / 2
    return linear_layer(torch.cat([-linear.weight, linear.weight]) / 2, bias)


def folded_to_one_row(make_head: MakeHead, linear: nn.Linear) -> nn.Linear:
    """The layer of one logit that gives the second minus the first logit of `make_head` for two logits."""
    made = make_head(with_two_rows(linear))
    if not isinstance(made, nn.Linear):
        raise UserError(
            f"a {type(made).__name__} does not fold into a layer with one logit; add the method after the model with "
            "longtail.attach"
        )
    weight, bias = made.weight.detach(), made.bias.detach()
    return linear_layer(weight[1:] - weight[:1], bias[1:] - bias[:1]).requires_grad_(made.weight.requires_grad)


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


def head_path(network: nn.Module) -> str:
    """The path of the linear layer in the `head` of a network of this library."""
    inside = network.get_submodule("head").named_modules()
    path = next(path for path, module in inside if isinstance(module, nn.Linear))
    return f"head.{path}" if path else "head"


def head_of(network: nn.Module) -> nn.Linear:
    """The linear layer in the `head` of a network of this library."""
    return cast(nn.Linear, network.get_submodule(head_path(network)))


def with_head(network: nn.Module, head: nn.Module) -> nn.Module:
    """A copy of a network of this library with another layer in place of `head_of(network)`."""
    old = head_of(network)
    return with_layers(network, [old], [head.train(old.training)])
