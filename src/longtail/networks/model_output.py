"""Where the logits are in the output of a model: the tensor itself, an entry, or an attribute."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

from torch import Tensor

LOGITS = "logits"


Step = tuple[Literal["entry", "attribute"], Any]


@dataclass(frozen=True)
class Place:
    """One place in the output of a model: the entries and attributes that lead to it; none if it is the output."""

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        names = ".".join(str(key) for _, key in self.steps)
        return f"the entry {names!r} of its output" if names else "its output"

    def raw(self, output: Any) -> Tensor:
        """The value at this place."""
        for kind, key in self.steps:
            output = output[key] if kind == "entry" else getattr(output, key)
        return output

    def read(self, output: Any) -> Tensor:
        """The logits (N, K) at this place, without trailing dimensions of size 1."""
        return self.raw(output).flatten(1)

    def replaced(self, output: Any, logits: Tensor) -> Any:
        """A copy of the output with other logits (N, K) at this place."""
        if not self.steps:
            return logits.reshape(output.shape)
        (kind, key), inner = self.steps[0], Place(self.steps[1:])
        value = inner.replaced(output[key] if kind == "entry" else getattr(output, key), logits)
        if isinstance(output, tuple):
            entries = [value if number == key else entry for number, entry in enumerate(output)]
            return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
        changed = copy.copy(output)
        if kind == "entry":
            changed[key] = value
        else:
            object.__setattr__(changed, key, value)  # of a frozen data class, too
        return changed


def places(output: Any, samples: int | None = None) -> list[Place]:
    """Every place that holds one row of numbers per sample; only those named `logits` if there are any."""
    named = [place for place in _entries(output) if _has_rows(place.raw(output), samples)]
    called = [place for place in named if place.steps and place.steps[-1][1] == LOGITS]
    return called or named


def _entries(output: Any, depth: int = 3) -> list[Place]:
    """The places of the tensors in an output."""
    if isinstance(output, Tensor):
        return [Place()]
    steps: list[Step] = []
    if isinstance(output, Mapping):
        steps = [("entry", key) for key in output]
    elif isinstance(output, tuple | list):
        steps = [("entry", number) for number in range(len(output))]
    elif hasattr(output, LOGITS):
        steps = [("attribute", LOGITS)]
    elif is_dataclass(output):
        steps = [("attribute", name) for name in vars(output)]
    inside = {step: _entries(Place((step,)).raw(output), depth - 1) for step in steps} if depth else {}
    return [Place((step, *place.steps)) for step, found in inside.items() for place in found]


def _has_rows(value: Any, samples: int | None) -> bool:
    """Whether this is a tensor (N, K) or (N, K, 1, 1) with at least two classes."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    return samples in (None, len(value)) and value.shape[1] > 1 and value.shape[2:].numel() == 1


def shapes(output: Any) -> str:
    """The shapes of the tensors in an output, for error messages."""
    known = [str(tuple(place.raw(output).shape)) for place in _entries(output)]
    return ", ".join(known) or f"a {type(output).__name__}"
