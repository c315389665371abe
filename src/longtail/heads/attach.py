"""A model followed by a calibration of its logits, for models into which a calibration cannot be folded.

`OutputPath` says where the logits are in what a model returns: a tensor, an entry of a tuple or dictionary, an
attribute of an object.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.files.tensors import single_at_least

LOGITS = "logits"
Step = tuple[Literal["entry", "attribute"], Any]


@dataclass(frozen=True)
class OutputPath:
    """The entries and attributes that lead to a tensor in the output of a model; none if it is the output."""

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        names = ".".join(str(key) for _, key in self.steps)
        return f"the entry {names!r} of its output" if names else "its output"

    def logits(self, output: Any) -> Tensor:
        """The logits (N, K) at this path, without trailing dimensions of size 1; of one logit per sample (N, 1)."""
        for kind, key in self.steps:
            output = output[key] if kind == "entry" else getattr(output, key)
        return output.reshape(len(output), -1)

    def replaced(self, output: Any, logits: Tensor) -> Any:
        """A copy of the output with other logits (N, K) at this path."""
        if not self.steps:
            return logits.reshape(output.shape)
        (kind, key), inner = self.steps[0], OutputPath(self.steps[1:])
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


def logits_paths(output: Any, samples: int | None = None) -> list[OutputPath]:
    """Paths of the tensors (N, K) or (N, K, 1, 1), K > 1; only those named `logits` if there are any.

    If there are none, those of tensors (N,) or (N, 1): one logit per sample.
    """
    rows = [
        (path, value)
        for path, value in _tensors(output)
        if value.is_floating_point() and value.ndim and value.shape[2:].numel() == 1 and samples in (None, len(value))
    ]
    several = [path for path, value in rows if value.ndim > 1 and value.shape[1] > 1]
    paths = several or [path for path, _ in rows]
    return [path for path in paths if path.steps and path.steps[-1][1] == LOGITS] or paths


def two_logits(logit: Tensor) -> Tensor:
    """Logits (N, 2) of one logit (N, 1): the softmax of (-z / 2, z / 2) is the sigmoid of z.

    >>> two_logits(torch.tensor([[3.0]])).tolist()
    [[-1.5, 1.5]]
    """
    return torch.cat([-logit / 2, logit / 2], 1)


def one_logit(logits: Tensor) -> Tensor:
    """One logit (N, 1) of logits (N, 2): the second minus the first."""
    return logits[:, 1:] - logits[:, :1]


def _tensors(output: Any, depth: int = 3) -> list[tuple[OutputPath, Tensor]]:
    """The tensors in an output."""
    if isinstance(output, Tensor):
        return [(OutputPath(), output)]
    inside: list[tuple[Step, Any]] = []
    if isinstance(output, Mapping):
        inside = [(("entry", key), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        inside = [(("entry", number), value) for number, value in enumerate(output)]
    elif hasattr(output, LOGITS):
        inside = [(("attribute", LOGITS), getattr(output, LOGITS))]
    elif is_dataclass(output):
        inside = [(("attribute", name), value) for name, value in vars(output).items()]
    return [
        (OutputPath((step, *path.steps)), tensor)
        for step, value in (inside if depth else ())
        for path, tensor in _tensors(value, depth - 1)
    ]


def shapes(output: Any) -> str:
    """The shapes of the tensors in an output, for error messages."""
    return ", ".join(str(tuple(value.shape)) for _, value in _tensors(output)) or f"a {type(output).__name__}"


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
    """A model followed by a calibration of its logits (N, K), or of its one logit per sample.

    It takes the same inputs as the model and returns an output of the same form. Attributes that it does not
    have are looked up in the model.

    Args:
        model: returns logits: a tensor, or an object that holds them.
        calibration: logits (N, K) to logits (N, K).
        classes: K.
        path: where the logits are in the output; None to look for them in every output.
    """

    def __init__(self, model: nn.Module, calibration: nn.Module, classes: int, path: OutputPath | None = None) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration
        self.classes = classes
        self.path = path
        self.examined, self.suspicious = path is not None, 0
        self.training = model.training

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = self.model(*inputs, **named)
        path = self.path or self._logits_path(output)
        logits = path.logits(output)
        single = logits.shape[1] == 1
        if not self.examined and not torch.compiler.is_compiling():
            self._examine(torch.cat([1 - logits, logits], 1).detach() if single else logits.detach())
        given = single_at_least(logits)
        calibrated = one_logit(self.calibration(two_logits(given))) if single else self.calibration(given)
        return path.replaced(output, calibrated.to(logits.dtype))

    def _logits_path(self, output: Any) -> OutputPath:
        widths = (1, 2) if self.classes == 2 else (self.classes,)
        paths = [path for path in logits_paths(output) if path.logits(output).shape[1] in widths]
        if len(paths) != 1:
            raise UserError(
                f"{type(self.model).__name__} returns {shapes(output)}: it is not clear which of these are the logits "
                f"of {self.classes} classes; return them as the entry 'logits', or call attach with batch="
            )
        return paths[0]

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
