"""Record what layers receive and return while a model runs, or change what they return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from longtail.heads.layers import whole

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
