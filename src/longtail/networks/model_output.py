"""Where the logits are in the output of a model: the tensor itself, an entry, or an attribute."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

from torch import Tensor

LOGITS = "logits"


@dataclass(frozen=True)
class Place:
    """One place in the output of a model."""

    kind: Literal["whole", "entry", "attribute"] = "whole"
    key: Any = None

    def __str__(self) -> str:
        return "its output" if self.kind == "whole" else f"the entry {self.key!r} of its output"

    def raw(self, output: Any) -> Tensor:
        """The value at this place."""
        if self.kind == "whole":
            return output
        return output[self.key] if self.kind == "entry" else getattr(output, self.key)

    def read(self, output: Any) -> Tensor:
        """The logits (N, K) at this place, without trailing dimensions of size 1."""
        return self.raw(output).flatten(1)

    def replaced(self, output: Any, logits: Tensor) -> Any:
        """A copy of the output with other logits (N, K) at this place."""
        if self.kind == "whole":
            return logits.reshape(output.shape)
        logits = logits.reshape(self.raw(output).shape)
        if isinstance(output, tuple):
            entries = [logits if number == self.key else entry for number, entry in enumerate(output)]
            return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
        changed = copy.copy(output)
        if self.kind == "entry":
            changed[self.key] = logits
        else:
            setattr(changed, self.key, logits)
        return changed


def places(output: Any, samples: int | None = None) -> list[Place]:
    """Every place that holds one row of numbers per sample; only the place named `logits` if there is one."""
    named = _entries(output)
    if isinstance(output, Tensor):
        named = [Place()]
    called = [place for place in named if place.key == LOGITS]
    return [place for place in called or named if _has_rows(place.raw(output), samples)]


def _entries(output: Any) -> list[Place]:
    if isinstance(output, Mapping):
        return [Place("entry", key) for key in output]
    if isinstance(output, tuple | list):
        return [Place("entry", number) for number in range(len(output))]
    if hasattr(output, LOGITS):
        return [Place("attribute", LOGITS)]
    if is_dataclass(output):
        return [Place("attribute", name) for name in vars(output)]
    return []


def _has_rows(value: Any, samples: int | None) -> bool:
    """Whether this is a tensor (N, K) or (N, K, 1, 1) with at least two classes."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    return samples in (None, len(value)) and value.shape[1] > 1 and value.shape[2:].numel() == 1


def shapes(output: Any) -> str:
    """The shapes of the tensors in an output, for error messages."""
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    values = [place.raw(output) for place in _entries(output)]
    known = [str(tuple(value.shape)) for value in values if isinstance(value, Tensor)]
    return ", ".join(known) or f"a {type(output).__name__}"
