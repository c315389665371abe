"""Where the logits stand in what a model returns: the tensor itself, an entry, an attribute."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

from torch import Tensor

LOGITS = "logits"


@dataclass(frozen=True)
class Place:
    """One place in the answer of a model."""

    kind: Literal["whole", "entry", "attribute"] = "whole"
    key: Any = None

    def __str__(self) -> str:
        return "its answer" if self.kind == "whole" else f"the entry {self.key!r} of its answer"

    def raw(self, answer: Any) -> Tensor:
        """What stands there."""
        if self.kind == "whole":
            return answer
        return answer[self.key] if self.kind == "entry" else getattr(answer, self.key)

    def read(self, answer: Any) -> Tensor:
        """The logits (N, K) there; trailing dimensions of size 1 are left out."""
        return self.raw(answer).flatten(1)

    def replaced(self, answer: Any, logits: Tensor) -> Any:
        """The same answer with other logits (N, K) there; what the model returned is left as it is."""
        if self.kind == "whole":
            return logits.reshape(answer.shape)
        logits = logits.reshape(self.raw(answer).shape)
        if isinstance(answer, tuple):
            entries = [logits if number == self.key else entry for number, entry in enumerate(answer)]
            return type(answer)(*entries) if hasattr(answer, "_fields") else type(answer)(entries)
        changed = copy.copy(answer)
        if self.kind == "entry":
            changed[self.key] = logits
        else:
            setattr(changed, self.key, logits)
        return changed


def places(answer: Any, samples: int | None = None) -> list[Place]:
    """Every place of one row of numbers per sample; only `logits` where something is called that."""
    named = _entries(answer)
    if isinstance(answer, Tensor):
        named = [Place()]
    called = [place for place in named if place.key == LOGITS]
    return [place for place in called or named if _has_rows(place.raw(answer), samples)]


def _entries(answer: Any) -> list[Place]:
    if isinstance(answer, Mapping):
        return [Place("entry", key) for key in answer]
    if isinstance(answer, tuple | list):
        return [Place("entry", number) for number in range(len(answer))]
    if hasattr(answer, LOGITS):
        return [Place("attribute", LOGITS)]
    if is_dataclass(answer):
        return [Place("attribute", name) for name in vars(answer)]
    return []


def _has_rows(value: Any, samples: int | None) -> bool:
    """Whether this is a tensor (N, K) of two classes or more, or (N, K, 1, 1)."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    return samples in (None, len(value)) and value.shape[1] > 1 and value.shape[2:].numel() == 1


def shapes(answer: Any) -> str:
    """The shapes of the tensors in an answer, for a message."""
    if isinstance(answer, Tensor):
        return str(tuple(answer.shape))
    values = [place.raw(answer) for place in _entries(answer)]
    known = [str(tuple(value.shape)) for value in values if isinstance(value, Tensor)]
    return ", ".join(known) or f"a {type(answer).__name__}"
