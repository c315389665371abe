"""Checks whether the layers of a head explain the output of a model for a batch.

The head is found on a few samples. A model with early exits, with a branch that depends on the input or with a clamp
may return something else for other samples. So the output for every batch is compared with what the outputs of the
layers give, which costs next to nothing. Only where no simple sum or choice of them gives the output (a mean over
some of the tokens), the batch is run a second time with changed layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from longtail.core.arrays import single_at_least
from longtail.networks.head_layers import Seen

Way = Literal["last", "mean", "mean of blocks", "one of them", "again"]
"""How a layer's outputs make the model's: that of its last run, a mean over tokens, places or runs, the same with the
samples side by side, one token or place; or unknown, so that a second run has to show it."""

Outputs = Mapping[str, Sequence[Seen]]


def accounted(
    way: Way, layers: Mapping[str, nn.Module], gains: Sequence[float], seen: Outputs, answer: Tensor
) -> Tensor | None:
    """The output (N, K) that the layers give in this way; None if they cannot."""
    parts = []
    for (path, layer), gain in zip(layers.items(), gains, strict=True):
        outputs = [single_at_least(output) for _, output in seen[path]]
        part = _part(way, layer, outputs, single_at_least(answer) / sum(gains))
        if part is None:
            return None
        parts.append(gain * part.to(answer.device))
    return torch.stack(parts).sum(0)


def find_way(layers: Mapping[str, nn.Module], gains: Sequence[float], seen: Outputs, answer: Tensor) -> Way:
    """How the layers give this output of the model."""
    for way in get_args(Way)[:-1]:
        given = accounted(way, layers, gains, seen, answer)
        if given is not None and alike(given, answer):
            return way
    return "again"


def alike(given: Tensor, answer: Tensor, *, exact: bool | None = None) -> bool:
    """Whether two outputs are the same but for rounding; `exact` unless the numbers, or those before, are half."""
    share = 1e-3 if (is_exact(answer) if exact is None else exact) else 0.05
    return given.shape == answer.shape and bool((given - answer).abs().max() <= share * answer.abs().max())


def is_exact(values: Tensor) -> bool:
    """Whether numbers are in single or double precision."""
    return values.dtype in (torch.float32, torch.float64)


def _part(way: Way, layer: nn.Module, outputs: Sequence[Tensor], target: Tensor) -> Tensor | None:
    samples, classes = target.shape
    if not outputs:
        return None
    if way == "last":
        last = outputs[-1]
        return last.reshape(target.shape) if len(last) == samples and last.numel() == target.numel() else None
    by_class = [output if isinstance(layer, nn.Linear) else output.movedim(1, -1) for output in outputs]
    if any(output.shape[-1] != classes or output.numel() % target.numel() for output in by_class):
        return None
    if way == "mean of blocks":
        return torch.stack([output.reshape(-1, samples, classes).mean(0) for output in by_class]).mean(0)
    if any(len(output) % samples for output in by_class):
        return None
    each = torch.cat([output.reshape(samples, -1, classes) for output in by_class], 1)
    if way == "mean":
        return each.mean(1)
    nearest = (each - target.unsqueeze(1)).abs().amax(2).argmin(1)
    return each[torch.arange(samples, device=each.device), nearest]


def holds(
    before: Tensor, gain: float, moved: Callable[[Tensor, Tensor], Tensor], form: Callable[[Tensor], Tensor]
) -> bool:
    """Whether the output changes as expected when the outputs of the layers are scaled and shifted per class.

    Args:
        before: logits (N, K), in the precision of the model.
        gain: sum of the gains of the layers.
        moved: the output of the model while its layers are scaled by (K,) and shifted by (K,).
        form: what the model makes of logits in the end.
    """
    scale, shift = scale_and_shift(before)
    expected = form(scale * before.cpu().double() + gain * shift)
    apart = float((moved(scale, shift).cpu().double() - expected).abs().max())
    return apart <= max(2.0, abs(gain)) * (1e-4 if is_exact(before) else 0.05) * float(expected.abs().max())


def scale_and_shift(before: Tensor) -> tuple[Tensor, Tensor]:
    """A scale (K,) and a shift (K,) that differ between classes; the shift is as large as these logits (N, K)."""
    numbers = torch.arange(before.shape[1], dtype=torch.float64)
    size = float(before.abs().max()) or 1.0
    return 1 + 0.4 * torch.sin(1.7 * numbers + 0.2), size * torch.cos(2.3 * numbers + 0.4)
