"""Which layer of anybody's model is the classifier: the linear layer whose output the model answers with.

Names and places can mislead; one batch does not. A layer that only looks linear (a cosine head is
often a subclass of `nn.Linear`) is refused here, for a repair cannot be folded into its weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.networks.head import find_head

CLOSE = 1e-3
WITHOUT_MODEL = "calibrate its saved logits instead (MARC().fit(logits, y), or the command on files)"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled parts of a model run as plain Python, where hooks are heard."""
    if hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def answering_head(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> str:
    """The name of the linear layer whose output is the answer of the model to one batch.

    The output may have gone through a softmax; then it still is the classifier.
    """
    guess = find_head(model)
    seen: dict[str, Tensor] = {}
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    handles = [layer.register_forward_hook(_keep(seen, path)) for path, layer in layers.items()]
    try:
        answers = _answers(model(*inputs, **named))
    finally:
        for handle in handles:
            handle.remove()
    if not answers or not all(bool(answer.isfinite().all()) for answer in answers):
        return guess
    logits = answers[0]
    found = [
        {path: factor for path, output in seen.items() if (factor := _factor(output, answer))} for answer in answers
    ]
    found = [factors for factors in found if factors]
    if len(found) > 1:
        several = ", ".join(list(factors)[-1] for factors in found)
        raise UserError(
            f"{type(model).__name__} answers with the outputs of several layers ({several}); "
            "say which is the classifier: head="
        )
    if found:
        path = guess if guess in found[0] else list(found[0])[-1]
        if abs(found[0][path] - 1) > CLOSE:
            raise UserError(
                f"{type(model).__name__} multiplies what {path!r} gives by {found[0][path]:.3g}; put that factor into "
                f"its weight and bias, or pass head={path!r} to repair the layer by what it gives itself"
            )
        return path
    if guess in seen and seen[guess].shape[-1] == logits.shape[-1] and seen[guess].ndim != 2:
        return guess  # it scores parts of a sample: that is explained where it is used
    raise UserError(
        f"no nn.Linear of {type(model).__name__} gives its output {tuple(logits.shape)} (the likeliest is {guess!r}); "
        f"pass head= if that is the classifier all the same, or {WITHOUT_MODEL}"
    )


def _keep(seen: dict[str, Tensor], path: str) -> Any:
    def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        # Of layers within a network only the shape is needed.
        seen[path] = output.detach() if output.ndim == 2 else output.detach()[:0].clone()

    return hook


def _answers(answer: Any) -> list[Tensor]:
    """What a model says, (N, K): a tensor, the entry `logits`, or whatever of several things has that shape."""
    if isinstance(answer, Mapping):
        several = [answer["logits"]] if "logits" in answer else list(answer.values())
    elif hasattr(answer, "logits"):
        several = [answer.logits]
    else:
        several = list(answer) if isinstance(answer, tuple | list) else [answer]
    return [one.detach() for one in several if isinstance(one, Tensor) and one.ndim == 2]


def _factor(output: Tensor, answer: Tensor) -> float | None:
    """What the output of a layer is multiplied by to give the answer; 1 for its softmax too, None if it is no such."""
    if output.shape != answer.shape:
        return None
    output, answer = output.cpu().double(), answer.cpu().double()  # not every device computes in float64
    if torch.equal(output, answer) or _close(output.log_softmax(1), answer) or _close(output.softmax(1), answer):
        return 1.0
    factor = float((output * answer).sum() / output.square().sum().clamp(min=1e-30))
    return factor if factor > 0 and _close(factor * output, answer) else None


def _close(one: Tensor, other: Tensor, share: float = CLOSE) -> bool:
    return float((one - other).abs().max()) <= share * float(other.abs().max())


def require_linear(layer: nn.Linear, path: str, features: Tensor, output: Tensor) -> None:
    """The layer gives `W x + b`, whatever its class is called."""
    if not bool(output.isfinite().all()):
        raise UserError(f"{path or 'the model'} gives NaN or inf on the first batch; look at its inputs and weights")
    bias = None if layer.bias is None else layer.bias.cpu().double()
    expected = F.linear(features.cpu().double(), layer.weight.cpu().double(), bias)
    exact = output.dtype in (torch.float32, torch.float64) and layer.weight.dtype in (torch.float32, torch.float64)
    if not _close(expected, output.cpu().double(), share=1e-2 if exact else 0.1):
        raise UserError(
            f"{path or 'the model'} ({type(layer).__name__}) does not give weight times input plus bias (a cosine "
            f"head?), so nothing folds into it; {WITHOUT_MODEL}, or use longtail.networks.cosine.CosineHead"
        )
