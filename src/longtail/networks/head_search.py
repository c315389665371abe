"""Which layers make the answer of anybody's model: found by running it on a few samples.

Names and places can mislead; the answer does not. A layer whose output is the answer is the head. Where none
is, the outputs of layers are scaled and shifted class by class, and the answer shows which of them it is made
of: if it changes as they do, whatever stands between (a token picked, a mean over tokens, crops or two heads,
a factor), then a calibration folded into those layers calibrates the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.networks.answers import Place, places, shapes
from longtail.networks.head_folding import why_not_linear
from longtail.networks.head_layers import changed, layers_of, noting, one_vector_each, watching, width

Form = Literal["logits", "log_softmax", "softmax"]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Head:
    """What the answer of a model is made of.

    Args:
        place: where the answer stands in what the model returns.
        layers: paths of the layers whose outputs make it; none if there are no such layers.
        gains: what the output of each is multiplied by.
        form: what the model makes of the logits before it answers.
        has_features: whether each of the layers sees one vector per sample.
        obstacle: why nothing folds into the layers; empty if it does.
    """

    place: Place
    layers: tuple[str, ...] = ()
    gains: tuple[float, ...] = ()
    form: Form = "logits"
    has_features: bool = False
    obstacle: str = ""

    def formed(self, logits: Tensor) -> Tensor:
        """The answer that the model makes of logits (N, K)."""
        return logits if self.form == "logits" else getattr(logits, self.form)(1)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled parts of a model run as plain Python, where hooks are heard."""
    if hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def search(model: nn.Module, run: Callable[[], Any], samples: int, only: str | None = None) -> Head:
    """What the answer of a model to `run()` is made of; with `only`, of that layer and those below it.

    `run` gives the answer to the same samples each time, with the same random numbers.
    """
    name, layers = type(model).__name__, layers_of(model)
    below = list(layers) if only is None else _below(model, only, layers)
    with noting(layers, samples) as seen:
        answer = run()
    spots = places(answer, samples)
    if not spots:
        raise UserError(
            f"{name} answers with {shapes(answer)} for {samples} samples; it must give one row of at least two logits "
            "per sample, one number per class"
        )
    if not any(bool(spot.read(answer).isfinite().all()) for spot in spots):
        raise UserError(f"{name} gives NaN or inf on the first batch; look at its inputs and weights")
    ran = {path: output for path, output in seen.items() if path in below}
    heads = [_find(spot, spot.read(answer).detach(), layers, ran, run) for spot in spots]
    found = [head for head in heads if head is not None]
    if len(found) > 1:
        several = ", ".join(head.layers[-1] for head in found)
        raise UserError(
            f"{name} answers with the outputs of several layers ({several}); say which is the classifier: head="
        )
    if found:
        return _examined(found[0], layers, run, samples)
    if only is not None:
        raise UserError(
            f"the answer of {name} is not made of what {only!r} gives alone, so a calibration folded into that would "
            "do something else; leave head= out to have the layers found that make the answer"
        )
    if len(spots) > 1:
        raise UserError(
            f"{name} answers with several tensors ({shapes(answer)}), and no layer shows which are the logits; return "
            "them alone, or as the entry 'logits'"
        )
    return _without_layers(model, spots[0], spots[0].read(answer))


def _below(model: nn.Module, name: str, layers: dict[str, nn.Module]) -> list[str]:
    """The layers that a name stands for: itself, or those inside of it; a layer may have another name too."""
    try:
        named = {id(module) for module in model.get_submodule(name).modules()}
    except AttributeError:
        named = set()
    found = [path for path, layer in layers.items() if id(layer) in named]
    if not found:
        raise UserError(
            f"{type(model).__name__} has no layer called {name!r}; its layers: {', '.join(list(layers)[-8:])}"
        )
    return found


def _find(
    spot: Place, logits: Tensor, layers: dict[str, nn.Module], seen: Outputs, run: Callable[[], Any]
) -> Head | None:
    wide = {path: output for path, output in seen.items() if width(layers[path], output) == logits.shape[1]}
    return _direct(spot, logits, wide) or _probed(spot, logits, layers, wide, run)


def _direct(spot: Place, logits: Tensor, seen: Outputs) -> Head | None:
    """The layer whose output is the answer, or becomes it by a softmax or its logarithm."""
    for path, output in reversed(seen.items()):
        rows = output.flatten(1)
        if rows.shape != logits.shape:
            continue
        if torch.equal(rows, logits):
            return Head(spot, (path,), (1.0,))
        for form in get_args(Form)[1:]:
            if close(getattr(rows.cpu().double(), form)(1), logits.cpu().double()):
                return Head(spot, (path,), (1.0,), form)
    return None


def _probed(
    spot: Place, logits: Tensor, layers: dict[str, nn.Module], seen: Outputs, run: Callable[[], Any]
) -> Head | None:
    """The layers that the answer follows when their outputs are scaled and shifted."""
    before, exact = logits.cpu().double(), is_exact(logits)
    numbers = torch.arange(before.shape[1])
    size = float(before.abs().max()) or 1.0
    shift, scale = size * torch.cos(2.3 * numbers + 0.4).double(), 1 + 0.4 * torch.sin(1.7 * numbers + 0.2).double()
    tolerance = size * (1e-4 if exact else 0.05)

    def answer(paths: list[str], scale: Tensor) -> Tensor:
        with changed([layers[path] for path in paths], scale, shift):
            return spot.read(run()).detach().cpu().double()

    gains: dict[str, float] = {}
    for path in seen:
        moved = answer([path], torch.ones_like(scale)) - before
        gain = float((moved @ shift).mean() / shift.square().sum())
        if abs(gain) > 0.01 and float((moved - gain * shift).abs().max()) <= tolerance * max(1.0, abs(gain)):
            gains[path] = _rounded(gain, 1e-4 if exact else 0.01)
    total = sum(gains.values())
    if abs(total) < 0.01:
        return None
    wrong = answer(list(gains), scale) - scale * before - total * shift
    if float(wrong.abs().max()) > tolerance * max(2.0, *map(abs, gains.values())):
        return None
    return Head(spot, tuple(gains), tuple(gains.values()))


def _rounded(gain: float, share: float) -> float:
    """A measured factor; a whole number or one by a whole number where it is that but for rounding."""
    near = float(round(gain)) if abs(gain) >= 1 else 1 / round(1 / gain)
    return near if abs(near - gain) <= share * abs(gain) else gain


def _examined(head: Head, layers: dict[str, nn.Module], run: Callable[[], Any], samples: int) -> Head:
    """The head with what only its own layers show: whether they are linear, and what they see."""
    own = {path: layers[path] for path in head.layers}
    with watching(own) as seen:
        run()
    features = [one_vector_each(layer, seen[path], samples) for path, layer in own.items()]
    obstacles = [why_not_linear(layer, path, seen[path]) for path, layer in own.items()]
    obstacle = next((reason for reason in obstacles if reason), "")
    return replace(head, has_features=all(one is not None for one in features), obstacle=obstacle)


def _without_layers(model: nn.Module, spot: Place, logits: Tensor) -> Head:
    name = type(model).__name__
    if float(logits.min()) >= 0 and float(logits.max()) <= 1:
        raise UserError(
            f"{name} answers with numbers between 0 and 1, probabilities or sigmoids, and no layer shows the logits "
            "they come from; return the logits"
        )
    quantised = [path for path, layer in model.named_modules() if ".quantized." in type(layer).__module__]
    if quantised:
        return Head(spot, obstacle=f"its layers are quantised ({quantised[-1]}), calibrate before that")
    return Head(spot, obstacle=f"no linear layer or convolution of {name} makes its answer {tuple(logits.shape)}")


def close(one: Tensor, other: Tensor, share: float = 1e-3) -> bool:
    """Whether two tensors are equal but for a share of the largest number."""
    return float((one - other).abs().max()) <= share * float(other.abs().max())


def is_exact(values: Tensor) -> bool:
    """Whether numbers are in single or double precision."""
    return values.dtype in (torch.float32, torch.float64)
