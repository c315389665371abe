"""A model followed by a calibration: a module that changes the logits in the model's output and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longtail.core.arrays import single_at_least
from longtail.errors import UserError
from longtail.networks.model_output import Place, places, shapes


class ScaleShift(nn.Module):
    """Logits (N, K) to `scale * logits + shift`; the scale (K,) and the shift (K,) are buffers, not parameters."""

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

    It takes the same inputs as the model and returns an output of the same form. Attributes that it does not
    have are looked up in the model.

    Args:
        model: returns logits: a tensor, or an object that holds them.
        calibration: logits (N, K) to logits (N, K).
        classes: K.
        place: where the logits are in the output; None to look for them in every output.
    """

    def __init__(self, model: nn.Module, calibration: nn.Module, classes: int, place: Place | None = None) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration
        self.classes = classes
        self.place = place
        self.examined, self.suspicious = place is not None, 0
        self.training = model.training

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = self.model(*inputs, **named)
        place = self.place or self._place(output)
        logits = place.read(output)
        if not self.examined and not torch.compiler.is_compiling():
            self._examine(logits.detach())
        return place.replaced(output, self.calibration(single_at_least(logits)).to(logits.dtype))

    def _place(self, output: Any) -> Place:
        found = [place for place in places(output) if place.read(output).shape[1] == self.classes]
        if len(found) != 1:
            raise UserError(
                f"{type(self.model).__name__} returns {shapes(output)}: it is not clear which of these are the logits "
                f"of {self.classes} classes; return them as the entry 'logits', or call attach with batch="
            )
        return found[0]

    def _examine(self, logits: Tensor) -> None:
        """Check on the first outputs that the model does not end in a softmax: one row may look so by chance."""
        values = logits.float()
        sums = (values.logsumexp(1).abs() < 1e-3, ((values.sum(1) - 1).abs() < 1e-3) & (values >= 0).all(1))
        self.examined = not any(bool(one.all()) for one in sums)
        self.suspicious = 0 if self.examined else self.suspicious + len(logits)
        if self.suspicious > 1:
            raise UserError(
                f"{type(self.model).__name__} returns probabilities or their logarithms, but the method takes logits; "
                "use longtail.calibrate, which folds into the layer before the softmax, or call attach with batch= "
                "if the method was fitted on these outputs"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "model":
                raise
            return getattr(self.model, name)
