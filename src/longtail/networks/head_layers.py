"""Layers that can be a head: linear layers and convolutions; their inputs, outputs and weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from longtail.errors import UserError
from longtail.networks.sharded import whole

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Seen = tuple[Tensor, Tensor]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer and convolution, by its path."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, KINDS)}


def width(layer: nn.Module, output: Tensor) -> int:
    """The number of classes, if the output of this layer were logits."""
    return output.shape[-1 if isinstance(layer, nn.Linear) else 1]


def _by_class(layer: nn.Module, values: Tensor, output: Tensor) -> Tensor:
    """One number per class (K,), reshaped to broadcast with the output of a layer."""
    values = values.to(output.device, output.dtype)
    return values if isinstance(layer, nn.Linear) else values.view(-1, *[1] * (output.ndim - 2))


@contextmanager
def noting(layers: dict[str, nn.Module], samples: int) -> Iterator[dict[str, Tensor]]:
    """Collect the last output of each layer that runs; only its shape if it is not one row per sample."""
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            output = whole(output)
            has_rows = len(output) == samples and output.shape[2:].numel() == 1
            seen.pop(path, None)  # in the order in which they ran last
            seen[path] = output.clone() if has_rows else output[:0].clone()

        return hook

    with _hooks((layer, keep(path), False) for path, layer in layers.items()):
        yield seen


@contextmanager
def watching(layers: dict[str, nn.Module]) -> Iterator[dict[str, list[Seen]]]:
    """Collect (input, output) of layers each time they run."""
    seen: dict[str, list[Seen]] = {path: [] for path in layers}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
            # Copies: the model may change a tensor in place, and a view would keep its whole base in memory.
            (features,) = inputs or (named["input"],)
            seen[path].append((whole(features).clone(), whole(output).clone()))

        return hook

    with _hooks((layer, keep(path), True) for path, layer in layers.items()):
        yield seen


@contextmanager
def changed(layers: Sequence[nn.Module], scale: Tensor, shift: Tensor) -> Iterator[None]:
    """Inside the block the layers return `scale * output + shift`, class by class."""

    def hook(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * _by_class(layer, scale, output) + _by_class(layer, shift, output)

    with _hooks((layer, hook, False) for layer in layers):
        yield


@contextmanager
def _hooks(wanted: Iterable[tuple[nn.Module, Any, bool]]) -> Iterator[None]:
    """Register forward hooks, each with or without keyword arguments, while the block runs."""
    handles = [layer.register_forward_hook(hook, with_kwargs=named) for layer, hook, named in wanted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def one_vector_each(layer: nn.Module, seen: Sequence[Seen], samples: int) -> Tensor | None:
    """The input features (N, D) of a layer, if it ran once and received one vector per sample."""
    if len(seen) != 1:
        return None
    features = seen[0][0]
    if not isinstance(layer, nn.Linear) and features.shape[2:].numel() == 1 and _is_pointwise(layer):
        features = features.flatten(1)
    return features if features.ndim == 2 and len(features) == samples else None


def _is_pointwise(layer: nn.Module) -> bool:
    convolution = cast(nn.Conv2d, layer)
    return all(size == 1 for size in convolution.kernel_size) and convolution.groups == 1


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
