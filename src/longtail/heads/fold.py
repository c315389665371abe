"""Records the layers that produce the logits of a model while it runs, and folds a calibration into them.

A linear layer or a convolution computes `W x + b`. If the logits are `sum_i gain_i * output_i` (two averaged
heads, an ensemble, a factor at the end; each output can be a mean over tokens or positions), they equal the output
of one linear layer whose weight is the concatenation of `gain_i * W_i`. The calibration is folded into that layer,
and the result is split into the original layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.heads.layers import layer_of_zeros, linear_layer, scattered, weight_and_bias, whole

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
InputOutput = tuple[Tensor, Tensor]


@contextmanager
def recording(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[InputOutput]]]:
    """Collect (input, output) of layers each time they run."""
    recorded: dict[str, list[InputOutput]] = {path: [] for path in layers}

    def hook(path: str, layer: nn.Module, inputs: Any, named: dict[str, Tensor], output: Tensor) -> None:
        # Copies: the model may change a tensor in place, and a view would keep its whole base in memory.
        (features,) = inputs or (named["input"],)
        recorded[path].append((whole(features).clone(), whole(output).clone()))

    with _hooked((layer, partial(hook, path)) for path, layer in layers.items()):
        yield recorded


@contextmanager
def recording_rows(layers: Mapping[str, nn.Module], samples: int) -> Iterator[dict[str, Tensor]]:
    """Collect the last output of each layer, in the order in which they ran.

    Of an output that is not one row per sample, which may be large, only the shape is kept.
    """
    recorded: dict[str, Tensor] = {}

    def hook(path: str, layer: nn.Module, inputs: Any, named: Any, output: Tensor) -> None:
        output = whole(output)
        has_rows = len(output) == samples and output.shape[2:].numel() == 1
        recorded.pop(path, None)
        recorded[path] = output.clone() if has_rows else output[:0].clone()

    with _hooked((layer, partial(hook, path)) for path, layer in layers.items()):
        yield recorded


@contextmanager
def changed(layers: Sequence[nn.Module], scale: Tensor, shift: Tensor) -> Iterator[None]:
    """Inside the block the layers return `scale * output + shift`, with a scale (K,) and a shift (K,)."""

    def hook(layer: nn.Module, inputs: Any, named: Any, output: Tensor) -> Tensor:
        shape = (-1,) if isinstance(layer, nn.Linear) else (-1, *[1] * (output.ndim - 2))
        factor, term = (values.to(output.device, output.dtype).view(shape) for values in (scale, shift))
        return output * factor + term

    with _hooked((layer, hook) for layer in layers):
        yield


@contextmanager
def _hooked(hooks: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def head_features(layer: nn.Module, recorded: Sequence[InputOutput], samples: int) -> Tensor | None:
    """The input features (N, D) of a layer, if it ran once and received one vector per sample."""
    if len(recorded) != 1:
        return None
    features = recorded[0][0]
    if not isinstance(layer, nn.Linear):
        convolution = cast(nn.Conv2d, layer)
        if features.shape[2:].numel() == 1 and set(convolution.kernel_size) == {1} and convolution.groups == 1:
            features = features.flatten(1)
    return features if features.ndim == 2 and len(features) == samples else None


MakeHead = Callable[[nn.Linear], nn.Module]


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
    # The bias that the method adds goes to the layers that have a bias, otherwise to the first layer: an adapter
    # without a bias would lose it when it is merged.
    added = _bias_of(make_head, joined.weight, None)
    parts = [weight_and_bias(layer) for layer in layers]
    takers = [number for number, (_, bias) in enumerate(parts) if bias is not None] or [0]
    share = added / sum(gains[number] for number in takers)
    weights = made.weight.detach().split([weight.shape[1] for weight, _ in parts], 1)
    new = []
    for number, layer in enumerate(layers):
        old = parts[number][1]
        bias = None if old is None else _bias_of(make_head, joined.weight, old) - added
        if number in takers:
            bias = share if bias is None else bias + share
        new.append(_rebuilt(layer, weights[number] / gains[number], bias))
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


def why_not_linear(layer: nn.Module, path: str, recorded: Sequence[InputOutput]) -> str:
    """Why a calibration cannot be folded into the weights of a layer; empty if it can."""
    try:
        plain = _plain(layer, *weight_and_bias(layer, path))
    except UserError as error:
        return str(error)
    exact = all(value.dtype in (torch.float32, torch.float64) for value in (cast(Tensor, layer.weight), recorded[0][1]))
    for features, output in recorded:
        given, expected = output.cpu().double(), plain(features.cpu().double())
        if float((given - expected).abs().max()) > (1e-2 if exact else 0.1) * float(expected.abs().max()):
            return (
                f"{path or 'the model'} ({type(layer).__name__}) does not compute weight times input plus bias "
                "(it may be a cosine head)"
            )
    return ""


def _bias_of(make_head: MakeHead, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bias of `make_head` applied to a layer with this weight and bias."""
    return cast(nn.Linear, make_head(linear_layer(weight.detach(), bias))).bias.detach()


def _rebuilt(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A layer of the same kind as the old one with another weight (K, D) and bias (K,)."""
    if hasattr(layer.weight, "full_tensor"):
        return scattered(layer, weight.view(cast(Tensor, layer.weight).shape), bias)
    return _like(_plain(layer, weight, bias), layer)


def _plain(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return linear_layer(weight, bias)
    kind = next(kind for kind in LAYERS if isinstance(layer, kind))
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    settings = {name: getattr(layer, name) for name in names}
    new = cast(nn.Conv2d, layer_of_zeros(kind, **settings, bias=bias is not None, dtype=weight.dtype))
    with torch.no_grad():
        new.weight.copy_(weight.view(new.weight.shape))
        if bias is not None and new.bias is not None:
            new.bias.copy_(bias)
    return new


def _like(new: nn.Module, old: nn.Module) -> nn.Module:
    """The new layer with the dtype, device, mode and `requires_grad` of the old one."""
    weight = cast(Tensor, old.weight)
    trained = any(parameter.requires_grad for parameter in old.parameters())
    return new.to(weight.device, weight.dtype).requires_grad_(trained).train(old.training)
