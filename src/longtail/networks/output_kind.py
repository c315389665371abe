"""What a model returns if no layer outputs its logits: probabilities, sigmoids, logits after an activation, or others.

Probabilities and sigmoids are refused, because methods take logits. Logits after an activation (ReLU, a clamp) can
be calibrated by a layer that is added after the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.networks.head_account import is_exact

ASK = "return the logits"


def why_no_layer(model: nn.Module, output: Tensor, seen: Mapping[str, Tensor], raised: Callable[[str], Tensor]) -> str:
    """Why a calibration cannot be folded into a layer; raises if the output (N, K) does not consist of logits.

    Args:
        model: the model.
        output: what it returns.
        seen: outputs of its layers that give one number per class.
        raised: the output of the model while the output of a layer is raised by 100: probabilities stay below 1.
    """
    name = type(model).__name__
    numbers = output.cpu().double()
    shares = bool(((numbers >= 0) & (numbers <= 1)).all())
    if shares and bool(((numbers.sum(1) - 1).abs() < (1e-3 if is_exact(output) else 1e-2)).all()):
        raise UserError(f"{name} returns probabilities (each row sums to 1), and no layer outputs their logits; {ASK}")
    rows = {path: one.flatten(1).cpu().double() for path, one in seen.items() if one.numel() == output.numel()}
    before = [path for path, one in rows.items() if one.shape == numbers.shape and _follows(one, numbers)]
    if shares and before and _is_sigmoid(rows[before[-1]], numbers):
        raise UserError(f"{name} returns sigmoids of the output of {before[-1]}, one class at a time; {ASK}")
    before = before or [path for path in seen if shares and float(raised(path).max()) > 1]
    if before:
        return f"an activation (such as ReLU), a clamp or a feedback stands between {before[-1]} and the output"
    if shares:
        raise UserError(
            f"{name} returns numbers between 0 and 1, and no layer shows if they are probabilities or logits; {ASK}"
        )
    quantised = [path for path, layer in model.named_modules() if ".quantized." in type(layer).__module__]
    if quantised:
        return f"its layers are quantised ({quantised[-1]}); calibrate before quantising"
    return f"no linear layer or convolution of {name} produces its output of shape {tuple(output.shape)}"


def _follows(before: Tensor, after: Tensor) -> bool:
    """Whether one output is a rising function of the other, the same for all entries."""
    ordered = after.flatten()[before.flatten().argsort()]
    spread = float(after.max() - after.min())
    return spread > 0 and bool((ordered.diff() >= -1e-4 * spread).all())


def _is_sigmoid(before: Tensor, after: Tensor) -> bool:
    """Whether the logit of one output is a linear function of the other."""
    if not bool(((after > 0) & (after < 1)).all()):
        return False
    x, y = before.flatten(), after.logit().flatten()
    inputs = torch.stack([x, torch.ones_like(x)], 1)
    line = inputs @ torch.linalg.lstsq(inputs, y.unsqueeze(1)).solution
    return float((line[:, 0] - y).abs().max()) <= 1e-2 * float(y.max() - y.min())
