"""Finds the head of a model: the layers whose outputs are its logits.

One rule: linear layers or convolutions are the head if their outputs, each times a factor, add up to the logits:
directly, before a softmax, as one of several averaged heads, as a mean over tokens or positions, or as the token that
the model picks. It is verified on some samples, by scaling and shifting the outputs of the layers, and then on every
batch. Every other model is calibrated by a layer after it, with `longtail.attach`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.files.tensors import single_at_least
from longtail.heads.attach import OutputPath, logits_paths, shapes
from longtail.heads.fold import LAYERS, Calls, changed, gathered, recording, why_not_linear

Form = Literal["logits", "log_softmax", "softmax", "sigmoid"]
SINGLE_LABEL: tuple[Form, ...] = ("logits", "log_softmax", "softmax")
MULTI_LABEL: tuple[Form, ...] = ("logits", "sigmoid")
EXACT = (torch.float32, torch.float64)
Layers = Mapping[str, nn.Module]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Head:
    """The layers that produce the logits of a model."""

    path: OutputPath  # where the logits are in the output of the model
    layers: tuple[str, ...] = ()  # paths of the layers whose outputs add up to the logits; empty if there are none
    gains: tuple[float, ...] = ()  # the factor of each layer's output in that sum
    form: Form = "logits"  # what the model applies to the logits at the end
    has_features: bool = False  # whether each of the layers receives one vector per sample
    obstacle: str = ""  # why a calibration cannot be folded into the layers; empty if it can
    single: bool = False  # whether the model has one logit per sample, that of class 1 against class 0

    def output(self, logits: Tensor) -> Tensor:
        """What the model returns for logits (N, K), or for one logit (N, 1)."""
        if self.form in MULTI_LABEL:
            return logits if self.form == "logits" else logits.sigmoid()
        return getattr(logits, self.form)(1)

    def logits(self, calls: Calls, output: Tensor) -> Tensor | None:
        """The logits (N, K) that the layers gave; None if they do not explain the output (N, K) of the model.

        Several outputs of a layer for one sample (tokens, positions, runs) are averaged, or the model picks one.
        """
        samples, classes = output.shape
        rows = []
        for path in self.layers:
            outputs = [single_at_least(one) for _, one in calls[path]]
            if not outputs or any(one.shape[-1] != classes or not len(one) or len(one) % samples for one in outputs):
                return None
            rows.append(torch.cat([one.reshape(samples, -1, classes) for one in outputs], 1).to(output.device))
        finite = output.isfinite().all(1)  # rows that are not finite are named by the check of the logits
        target = single_at_least(output) / sum(self.gains)
        for picks in (False, True):
            terms = [_nearest(one, target) if picks else one.mean(1) for one in rows]
            logits = torch.stack([gain * term for gain, term in zip(self.gains, terms, strict=True)]).sum(0)
            if not finite.any() or close(self.output(logits)[finite], output[finite]):
                return logits
        return None

    def features(self, layers: Layers, calls: Calls, samples: int) -> Tensor | None:
        """The input (N, D) of the layers side by side, if each ran once on one vector per sample."""
        vectors = []
        for path in self.layers:
            inputs, layer = calls[path][0][0], layers[path]
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and set(layer.kernel_size) == {1}:
                inputs = inputs.flatten(1) if inputs.shape[2:].numel() == 1 and layer.groups == 1 else inputs
            if len(calls[path]) != 1 or inputs.ndim != 2 or len(inputs) != samples:
                return None
            vectors.append(inputs)
        return vectors[0] if len(vectors) == 1 else torch.cat([inputs.float() for inputs in vectors], 1)

    def only_for_first(self, model: nn.Module) -> Head:
        """The head of a model that computes the logits of some samples in another way than those of the first."""
        layers = ", ".join(self.layers)
        if self.form != "logits":
            raise UserError(
                f"{type(model).__name__} returns the {self.form} of the output of {layers} for the first samples, but "
                "not for others (an early exit, or a branch that depends on the input?); return the logits"
            )
        return Head(
            self.path,
            single=self.single,
            obstacle=f"its output comes from {layers} for the first samples, but not for others (an early exit, a "
            "clamp, or a branch that depends on the input?)",
        )


def _nearest(rows: Tensor, target: Tensor) -> Tensor:
    """Of several rows for each sample, (N, R, K), the one nearest to its target (N, K)."""
    nearest = (rows - target.unsqueeze(1)).abs().amax(2).argmin(1)
    return rows[torch.arange(len(rows), device=rows.device), nearest]


def close(values: Tensor, expected: Tensor, *, exact: bool | None = None) -> bool:
    """Whether two outputs are equal up to rounding; `exact` unless they were computed in half precision."""
    share = 1e-3 if (expected.dtype in EXACT if exact is None else exact) else 0.05
    return values.shape == expected.shape and bool((values - expected).abs().max() <= share * expected.abs().max())


def probe(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A scale (K,) and a shift (K,) that differ between classes; the shift is as large as these logits (N, K)."""
    numbers = torch.arange(logits.shape[1], dtype=torch.float64)
    size = float(logits.abs().max()) or 1.0
    return 1 + 0.4 * torch.sin(1.7 * numbers + 0.2), size * torch.cos(2.3 * numbers + 0.4)


def search(
    model: nn.Module, run: Run, samples: int, only: str | None = None, forms: tuple[Form, ...] = SINGLE_LABEL
) -> Head:
    """The head of a model, detected with some samples; with `only`, among that layer and those inside it.

    `run` runs the model on the same samples each time, with the same random numbers. `forms` are those that the output
    may have: in a model of one class per sample, sigmoids would not be the probabilities of the calibrated logits.
    """
    name = type(model).__name__
    try:
        output = run()
    except NotImplementedError as error:
        inside = ", ".join(child for child, _ in model.named_children())
        raise UserError(
            f"{name} has no forward that gives logits; write one, or pass the network inside it (its parts: "
            f"{inside or 'none'})"
        ) from error
    except Exception as error:
        raise UserError(f"{name} fails on the first batch: {type(error).__name__}: {error}") from error
    tensors = {path: gathered(path.logits(output)) for path in logits_paths(output, samples)}
    if not tensors:
        raise UserError(
            f"{name} returns {shapes(output)} for {samples} samples; it must return one row of logits per sample, or "
            "one logit for two classes"
        )
    if not any(bool(logits.isfinite().all()) for logits in tensors.values()):
        raise UserError(f"{name} returns NaN or inf on the first batch; check its inputs and weights")
    layers = _candidates(model, {logits.shape[1] for logits in tensors.values()}, only)
    with recording(layers) as calls:
        run()
    layers = {path: layer for path, layer in layers.items() if calls[path]}
    heads = [head for path in tensors if (head := _head_at(path, tensors[path], layers, calls, run, forms)) is not None]
    if len({head.layers for head in heads}) == 1:  # logits beside their softmax: a folded calibration changes both
        heads = [min(heads, key=lambda head: get_args(Form).index(head.form))]
    if len(heads) > 1:
        several = ", ".join(head.layers[-1] for head in heads)
        raise UserError(f"{name} returns the outputs of several layers ({several}); name the classifier with head=")
    if heads:
        (head,) = heads
        if only is None and len(tensors) > 1:
            _require_last(head, tensors, shapes(output), layers, run, name)
        reasons = [why_not_linear(layers[path], path, calls[path]) for path in head.layers]
        has_features = head.features(layers, calls, samples) is not None
        return replace(head, has_features=has_features, obstacle=next(filter(None, reasons), ""))
    if only is not None:
        raise UserError(
            f"the output of {name} does not depend on the output of {only!r} alone, so a calibration folded into "
            f"{only!r} would be wrong; leave out head= to search all layers"
        )
    if len(tensors) > 1:
        raise UserError(
            f"{name} returns several tensors ({shapes(output)}), and none is the output of a layer; return only the "
            "logits, or name them as the entry 'logits'"
        )
    ((path, logits),) = tensors.items()
    return Head(path, obstacle=_why_no_layer(model, logits), single=logits.shape[1] == 1 and forms != MULTI_LABEL)


def _candidates(model: nn.Module, widths: set[int], only: str | None) -> dict[str, nn.Module]:
    """The layers that give one of these numbers of classes; with `only`, that layer and those inside it."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LAYERS)}
    out = {path: one.out_features if isinstance(one, nn.Linear) else one.out_channels for path, one in layers.items()}
    candidates: dict[str, nn.Module] = {path: layer for path, layer in layers.items() if out[path] in widths}
    if only is None:
        return candidates
    try:
        named = {id(module) for module in model.get_submodule(only).modules()}
    except AttributeError:
        named = set()
    if not any(id(layer) in named for layer in layers.values()):
        raise UserError(
            f"{type(model).__name__} has no layer called {only!r}; its layers: {', '.join(list(layers)[-8:])}"
        )
    return {path: layer for path, layer in candidates.items() if id(layer) in named}


def _head_at(
    path: OutputPath, logits: Tensor, layers: Layers, calls: Calls, run: Run, forms: tuple[Form, ...]
) -> Head | None:
    """The layers whose outputs are, or add up to, the logits at a path of the output."""
    classes = logits.shape[1]
    wide = [name for name in layers if calls[name][-1][1].shape[-1] == classes]
    no_layers = Head(path, single=classes == 1 and forms != MULTI_LABEL)
    heads = [
        replace(no_layers, layers=(name,), gains=(1.0,), form=form)
        for name in reversed(wide)
        for form in (MULTI_LABEL if classes == 1 else forms)
    ]
    for head in heads:
        if _follows(head, logits, layers, calls, run):
            return head
    gains = _measured_gains(path, logits, {name: layers[name] for name in wide}, run)
    head = replace(no_layers, layers=tuple(gains), gains=tuple(gains.values()))
    return head if abs(sum(head.gains)) >= 0.01 and _follows(head, logits, layers, calls, run) else None


def _follows(head: Head, output: Tensor, layers: Layers, calls: Calls, run: Run) -> bool:
    """Whether the layers explain the output (N, K), also after their outputs were scaled and shifted.

    Outputs may be equal for these samples alone: a clamp, a branch by confidence.
    """
    logits = head.logits(calls, output)
    if logits is None:
        return False
    (scale, shift), gain = probe(logits), sum(head.gains)
    with changed([layers[path] for path in head.layers], scale, shift):
        moved = gathered(head.path.logits(run())).cpu().double()
    expected = head.output(scale * logits.cpu().double() + gain * shift)
    share = max(2.0, abs(gain)) * (1e-4 if output.dtype in EXACT else 0.05)
    return bool((moved - expected).abs().max() <= share * expected.abs().max())


def _measured_gains(path: OutputPath, logits: Tensor, layers: Layers, run: Run) -> dict[str, float]:
    """The factor of each layer's output in the logits, for layers whose shift shifts all logits by one factor."""
    _, shift = probe(logits)
    share = 1e-4 if logits.dtype in EXACT else 0.05
    gains: dict[str, float] = {}
    for name, layer in layers.items():
        with changed([layer], torch.ones_like(shift), shift):
            change = gathered(path.logits(run())).cpu().double() - logits.cpu().double()
        gain = float((change @ shift).mean() / shift.square().sum())
        error = float((change - gain * shift).abs().max())
        if abs(gain) > 0.01 and error <= share * float(shift.abs().max()) * max(1.0, abs(gain)):
            near = float(round(gain)) if abs(gain) >= 1 else 1 / round(1 / gain)  # n or 1/n, if it is that close
            gains[name] = near if abs(near - gain) <= min(share, 0.01) * abs(gain) else gain
    return gains


def _require_last(
    head: Head, tensors: Mapping[OutputPath, Tensor], described: str, layers: Layers, run: Run, name: str
) -> None:
    """Raise if another tensor of the output is computed from the head: the head may give features, not logits."""
    logits = tensors[head.path]
    with changed([layers[path] for path in head.layers], *probe(logits)):
        again = run()
    for path, old in tensors.items():
        if old.shape != logits.shape and not close(gathered(path.logits(again)), old):
            raise UserError(
                f"{name} returns several tensors ({described}), and {path} is computed from the output of "
                f"{head.layers[-1]}: which are the logits? Name them as the entry 'logits', or their layer with head="
            )


def _why_no_layer(model: nn.Module, output: Tensor) -> str:
    """Why a calibration cannot be folded into a layer; raises if the output (N, K) does not consist of logits."""
    name, values = type(model).__name__, output.cpu().double()
    if bool(((values >= 0) & (values <= 1)).all()):
        sums = (values.sum(1) - 1).abs() < (1e-3 if output.dtype in EXACT else 1e-2)
        kind = "probabilities (each row sums to 1)" if bool(sums.all()) else "numbers between 0 and 1"
        raise UserError(f"{name} returns {kind}, and no layer outputs their logits; return the logits")
    quantised = [path for path, layer in model.named_modules() if ".quantized." in type(layer).__module__]
    if quantised:
        return f"its layers are quantised ({quantised[-1]}); calibrate before quantising"
    return (
        f"no linear layer or convolution of {name} outputs its logits, of shape {tuple(output.shape)} (does an "
        "activation or another operation follow the last layer?)"
    )
