"""Which layers produce the logits of any model: found by running the model on a few samples.

Names and positions of layers can mislead, so the search compares outputs. If the output of a layer equals the
output of the model, that layer is the head. Otherwise the outputs of layers are scaled and shifted class by class.
If the output of the model changes in the same way, a calibration that is folded into those layers calibrates the
model, whatever lies between (selecting a token; a mean over tokens, crops or two heads; a constant factor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.networks.head_account import Way, alike, find_way, holds, is_exact, scale_and_shift
from longtail.networks.head_folding import why_not_linear
from longtail.networks.head_layers import changed, layers_of, noting, one_vector_each, watching, width
from longtail.networks.model_output import Place, places, shapes
from longtail.networks.output_kind import why_no_layer

Form = Literal["logits", "log_softmax", "softmax"]
Outputs = dict[str, Tensor]
Moved = Callable[[Sequence[str], Tensor, Tensor], Tensor]
"""The output of the model while the layers at these paths are scaled by (K,) and shifted by (K,)."""


@dataclass(frozen=True)
class Head:
    """The layers that produce the logits of a model.

    Args:
        place: where the logits are in the output of the model.
        layers: paths of the layers whose outputs add up to the logits; empty if there are none.
        gains: the factor of each layer's output in that sum.
        form: what the model applies to the logits at the end: nothing, a softmax or a log-softmax.
        has_features: whether each of the layers receives one vector per sample.
        way: how the outputs of the layers make the output of the model.
        obstacle: why a calibration cannot be folded into the layers; empty if it can.
    """

    place: Place
    layers: tuple[str, ...] = ()
    gains: tuple[float, ...] = ()
    form: Form = "logits"
    has_features: bool = False
    way: Way = "last"
    obstacle: str = ""

    def formed(self, logits: Tensor) -> Tensor:
        """What the model returns for logits (N, K)."""
        return logits if self.form == "logits" else getattr(logits, self.form)(1)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled parts of a model without compilation, because hooks do not run in compiled code."""
    if hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def search(model: nn.Module, run: Callable[[], Any], samples: int, only: str | None = None) -> Head:
    """The layers that produce the output of `run()`; with `only`, among that layer and those inside it.

    `run` runs the model on the same samples each time, with the same random numbers.
    """
    name, layers = type(model).__name__, layers_of(model)
    below = list(layers) if only is None else _below(model, only, layers)
    with noting(layers, samples) as seen:
        answer = run()
    spots = places(answer, samples)
    if not spots:
        raise UserError(
            f"{name} returns {shapes(answer)} for {samples} samples; it must return one row of logits per sample, "
            "with at least two classes"
        )
    if not any(bool(spot.read(answer).isfinite().all()) for spot in spots):
        raise UserError(f"{name} returns NaN or inf on the first batch; check its inputs and weights")
    ran = {path: output for path, output in seen.items() if path in below}
    heads = [_find(spot, spot.read(answer).detach(), layers, ran, run) for spot in spots]
    found = [head for head in heads if head is not None]
    if len({head.layers for head in found}) == 1:  # logits beside their softmax: a folded calibration changes both
        found = [min(found, key=lambda head: get_args(Form).index(head.form))]
    if len(found) > 1:
        several = ", ".join(head.layers[-1] for head in found)
        raise UserError(f"{name} returns the outputs of several layers ({several}); name the classifier with head=")
    if found:
        if only is None and len(spots) > 1:
            _require_last(found[0], answer, layers, run, name)
        return _examined(found[0], layers, run, samples)
    if only is not None:
        raise UserError(
            f"the output of {name} does not depend on the output of {only!r} alone, so a calibration folded into "
            f"{only!r} would be wrong; leave out head= to search all layers"
        )
    if len(spots) > 1:
        raise UserError(
            f"{name} returns several tensors ({shapes(answer)}), and no layer shows which are the logits; return "
            "only the logits, or name them as the entry 'logits'"
        )
    output = spots[0].read(answer).detach()
    wide = {path: seen for path, seen in ran.items() if width(layers[path], seen) == output.shape[1]}

    def raised(path: str) -> Tensor:
        with changed([layers[path]], torch.ones(output.shape[1]), torch.full((output.shape[1],), 100.0)):
            return spots[0].read(run()).detach()

    return Head(spots[0], obstacle=why_no_layer(model, output, wide, raised))


def _require_last(head: Head, answer: Any, layers: dict[str, nn.Module], run: Callable[[], Any], name: str) -> None:
    """Raise if another part of the output is computed from the head: features may be taken for logits."""
    logits = head.place.read(answer).detach()
    with changed([layers[path] for path in head.layers], *scale_and_shift(logits)):
        again = run()
    for place in places(answer, len(logits)):
        old, new = (place.read(output).detach() for output in (answer, again))
        if old.shape != logits.shape and not alike(new, old):
            raise UserError(
                f"{name} returns several tensors ({shapes(answer)}), and {place} is computed from the output of "
                f"{head.layers[-1]}: which are the logits? Name them as the entry 'logits', or their layer with head="
            )


def _below(model: nn.Module, name: str, layers: dict[str, nn.Module]) -> list[str]:
    """The layers that a name refers to: the layer itself, or the layers inside it."""
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

    def moved(paths: Sequence[str], scale: Tensor, shift: Tensor) -> Tensor:
        with changed([layers[path] for path in paths], scale, shift):
            return spot.read(run()).detach()

    return _direct(spot, logits, wide, moved) or _probed(spot, logits, wide, moved)


def _direct(spot: Place, logits: Tensor, seen: Outputs, moved: Moved) -> Head | None:
    """The layer whose output is the model's output, directly or through a softmax or log-softmax."""
    for path, output in reversed(seen.items()):
        rows = output.flatten(1)
        if rows.shape != logits.shape:
            continue
        for form in get_args(Form):
            head = Head(spot, (path,), (1.0,), form)
            same = torch.equal(rows, logits) if form == "logits" else alike(head.formed(rows.float()), logits)
            # An output may be equal only for these samples: a clamp, a branch by confidence.
            if same and holds(rows, 1.0, partial(moved, head.layers), head.formed):
                return head
    return None


def _probed(spot: Place, logits: Tensor, seen: Outputs, moved: Moved) -> Head | None:
    """The layers whose outputs, when scaled and shifted, scale and shift the output of the model."""
    before, exact = logits.cpu().double(), is_exact(logits)
    scale, shift = scale_and_shift(logits)
    tolerance = float(shift.abs().max()) * (1e-4 if exact else 0.05)
    gains: dict[str, float] = {}
    for path in seen:
        change = moved([path], torch.ones_like(scale), shift).cpu().double() - before
        gain = float((change @ shift).mean() / shift.square().sum())
        if abs(gain) > 0.01 and float((change - gain * shift).abs().max()) <= tolerance * max(1.0, abs(gain)):
            gains[path] = _rounded(gain, 1e-4 if exact else 0.01)
    head = Head(spot, tuple(gains), tuple(gains.values()))
    follows = abs(sum(gains.values())) >= 0.01 and holds(
        logits, sum(gains.values()), partial(moved, head.layers), head.formed
    )
    return head if follows else None


def _rounded(gain: float, share: float) -> float:
    """A measured factor, rounded to n or 1/n for a whole number n if it is that close."""
    near = float(round(gain)) if abs(gain) >= 1 else 1 / round(1 / gain)
    return near if abs(near - gain) <= share * abs(gain) else gain


def _examined(head: Head, layers: dict[str, nn.Module], run: Callable[[], Any], samples: int) -> Head:
    """The head, completed by running its own layers: whether they are linear, and what inputs they receive."""
    own = {path: layers[path] for path in head.layers}
    with watching(own) as seen:
        answer = head.place.read(run()).detach()
    features = [one_vector_each(layer, seen[path], samples) for path, layer in own.items()]
    obstacles = [why_not_linear(layer, path, seen[path]) for path, layer in own.items()]
    return replace(
        head,
        has_features=all(one is not None for one in features),
        way=find_way(own, head.gains, seen, answer) if head.form == "logits" else "last",
        obstacle=next((reason for reason in obstacles if reason), ""),
    )
