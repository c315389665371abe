"""A calibration behind a model: a small module that changes the logits of its answer and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longtail.core.arrays import single_at_least
from longtail.errors import UserError
from longtail.networks.answers import Place, places, shapes


class ScaleShift(nn.Module):
    """Logits (N, K) to `scale * logits + shift`, with a scale (K,) and a shift (K,) that are not trained."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.float())
        self.register_buffer("shift", shift.float())

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.scale + self.shift


class Attached(nn.Module):
    """A model followed by a calibration of its logits (N, K).

    It is called as the model is and answers in the same form; names that it does not have are the model's.

    Args:
        model: answers with logits: a tensor, or something that holds them.
        calibration: logits (N, K) to logits (N, K).
        classes: K.
        place: where the logits stand in the answer; without, it is looked for in every answer.
    """

    def __init__(self, model: nn.Module, calibration: nn.Module, classes: int, place: Place | None = None) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration
        self.classes = classes
        self.place = place
        self.examined = place is not None
        self.training = model.training

    def forward(self, *inputs: Any, **named: Any) -> Any:
        answer = self.model(*inputs, **named)
        place = self.place or self._place(answer)
        logits = place.read(answer)
        if not self.examined and not torch.compiler.is_compiling():
            self._examine(logits.detach())
        return place.replaced(answer, self.calibration(single_at_least(logits)).to(logits.dtype))

    def _place(self, answer: Any) -> Place:
        found = [place for place in places(answer) if place.read(answer).shape[1] == self.classes]
        if len(found) != 1:
            raise UserError(
                f"{type(self.model).__name__} answers with {shapes(answer)}: which of it are the logits of "
                f"{self.classes} classes? Return them as the entry 'logits', or attach with batch="
            )
        return found[0]

    def _examine(self, logits: Tensor) -> None:
        """The first answer shows whether a softmax stands at the end of the model."""
        self.examined = True
        sums = logits.float().logsumexp(1).abs(), (logits.float().sum(1) - 1).abs()
        if len(logits) > 1 and any(bool((apart < 1e-3).all()) for apart in sums):
            raise UserError(
                f"{type(self.model).__name__} answers with probabilities or their logarithms, the method takes logits; "
                "longtail.calibrate folds into the layer before, or attach with batch= if it was fitted on these"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "model":
                raise
            return getattr(self.model, name)
