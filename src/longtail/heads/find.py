"""Finds the head of a model: the layers whose outputs are its logits.

One rule: a linear layer or convolution belongs to the head if its output, times a factor, is the logits or a term of
them: directly, before a softmax, as one of several averaged heads, as a mean over tokens or positions, or as the
token that the model picks. It is verified on some samples, by scaling and shifting the outputs of the layers, and
then on every batch. Every other model is calibrated by a layer after it, with `longtail.attach`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.files.tensors import single_at_least
from longtail.heads.attach import OutputPath, logits_paths, shapes
from longtail.heads.fold import LAYERS, InputOutput, changed, head_features, recording, recording_rows, why_not_linear

Form = Literal["logits", "log_softmax", "softmax", "sigmoid"]
SINGLE_LABEL: tuple[Form, ...] = ("logits", "log_softmax", "softmax")
MULTI_LABEL: tuple[Form, ...] = ("logits", "sigmoid")
Reduction = Literal["mean", "pick", "unknown"]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Head:
    """The layers that produce the logits of a model.

    Args:
        path: where the logits are in the output of the model.
        layers: paths of the layers whose outputs add up to the logits; empty if there are none.
        gains: the factor of each layer's output in that sum.
        form: what the model applies to the logits at the end: nothing, a softmax, a log-softmax or a sigmoid.
        has_features: whether each of the layers receives one vector per sample.
        reduction: how several outputs of a layer for one sample (tokens, positions, runs) become one: their mean,
            or one of them; if unknown, a second run of each batch verifies the head.
        obstacle: why a calibration cannot be folded into the layers; empty if it can.
        single: whether the model has one logit per sample, that of class 1 against class 0.
    """

    path: OutputPath
    layers: tuple[str, ...] = ()
    gains: tuple[float, ...] = ()
    form: Form = "logits"
    has_features: bool = False
    reduction: Reduction = "mean"
    obstacle: str = ""
    single: bool = False

    def formed(self, logits: Tensor) -> Tensor:
        """What the model returns for logits (N, K), or for one logit (N, 1)."""
        if self.form in MULTI_LABEL:
            return logits if self.form == "logits" else logits.sigmoid()
        return getattr(logits, self.form)(1)

    def sum_of(
        self, layers: Mapping[str, nn.Module], recorded: Mapping[str, Sequence[InputOutput]], logits: Tensor
    ) -> Tensor | None:
        """The logits (N, K) computed from the outputs of the layers; None if their shapes do not fit."""
        terms = []
        for (path, layer), gain in zip(layers.items(), self.gains, strict=True):
            outputs = [single_at_least(output) for _, output in recorded[path]]
            term = _reduced(self.reduction, layer, outputs, single_at_least(logits) / sum(self.gains))
            if term is None:
                return None
            terms.append(gain * term.to(logits.device))
        return torch.stack(terms).sum(0)

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


def _reduced(reduction: Reduction, layer: nn.Module, outputs: Sequence[Tensor], logits: Tensor) -> Tensor | None:
    """All outputs of one layer as one row per sample, (N, K)."""
    samples, classes = logits.shape
    by_class = [output if isinstance(layer, nn.Linear) else output.movedim(1, -1) for output in outputs]
    if not by_class or any(output.shape[-1] != classes or len(output) % samples for output in by_class):
        return None
    each = torch.cat([output.reshape(samples, -1, classes) for output in by_class], 1)
    if reduction == "mean":
        return each.mean(1)
    nearest = (each - logits.unsqueeze(1)).abs().amax(2).argmin(1)
    return each[torch.arange(samples, device=each.device), nearest]


def close(values: Tensor, expected: Tensor, *, exact: bool | None = None) -> bool:
    """Whether two outputs are equal up to rounding; `exact` unless they were computed in half precision."""
    share = 1e-3 if (is_exact(expected) if exact is None else exact) else 0.05
    return values.shape == expected.shape and bool((values - expected).abs().max() <= share * expected.abs().max())


def is_exact(values: Tensor) -> bool:
    """Whether numbers are in single or double precision."""
    return values.dtype in (torch.float32, torch.float64)


def probe(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A scale (K,) and a shift (K,) that differ between classes; the shift is as large as these logits (N, K)."""
    numbers = torch.arange(logits.shape[1], dtype=torch.float64)
    size = float(logits.abs().max()) or 1.0
    return 1 + 0.4 * torch.sin(1.7 * numbers + 0.2), size * torch.cos(2.3 * numbers + 0.4)


def follows(head: Head, logits: Tensor, moved: Tensor) -> bool:
    """Whether the output of a model changed to `moved` as it should when its layers were changed by `probe(logits)`."""
    (scale, shift), gain = probe(logits), sum(head.gains)
    expected = head.formed(scale * logits.cpu().double() + gain * shift)
    difference = float((moved.cpu().double() - expected).abs().max())
    share = max(2.0, abs(gain)) * (1e-4 if is_exact(logits) else 0.05)
    return difference <= share * float(expected.abs().max())


def search(
    model: nn.Module, run: Run, samples: int, only: str | None = None, forms: tuple[Form, ...] = SINGLE_LABEL
) -> Head:
    """The head of a model, given its output for some samples; with `only`, among that layer and those inside it.

    `run` runs the model on the same samples each time, with the same random numbers. `forms` are those that the output
    may have: in a model of one class per sample, sigmoids would not be the probabilities of the calibrated logits.
    """
    name = type(model).__name__
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LAYERS)}
    allowed = set(layers) if only is None else _inside(model, only, layers)
    with recording_rows(layers, samples) as recorded:
        output = run()
    paths = logits_paths(output, samples)
    if not paths:
        raise UserError(
            f"{name} returns {shapes(output)} for {samples} samples; it must return one row of logits per sample, or "
            "one logit for two classes"
        )
    if not any(bool(path.logits(output).isfinite().all()) for path in paths):
        raise UserError(f"{name} returns NaN or inf on the first batch; check its inputs and weights")
    candidates = {path: rows for path, rows in recorded.items() if path in allowed}
    heads = [head for path in paths if (head := _head_at(path, output, layers, candidates, run, forms)) is not None]
    if len({head.layers for head in heads}) == 1:  # logits beside their softmax: a folded calibration changes both
        heads = [min(heads, key=lambda head: get_args(Form).index(head.form))]
    if len(heads) > 1:
        several = ", ".join(head.layers[-1] for head in heads)
        raise UserError(f"{name} returns the outputs of several layers ({several}); name the classifier with head=")
    if heads:
        if only is None and len(paths) > 1:
            _require_last(heads[0], output, layers, run, name)
        return _completed(heads[0], layers, run, samples)
    if only is not None:
        raise UserError(
            f"the output of {name} does not depend on the output of {only!r} alone, so a calibration folded into "
            f"{only!r} would be wrong; leave out head= to search all layers"
        )
    if len(paths) > 1:
        raise UserError(
            f"{name} returns several tensors ({shapes(output)}), and none is the output of a layer; return only the "
            "logits, or name them as the entry 'logits'"
        )
    logits = paths[0].logits(output).detach()
    return Head(paths[0], obstacle=_why_no_layer(model, logits), single=logits.shape[1] == 1 and forms != MULTI_LABEL)


def _inside(model: nn.Module, name: str, layers: Mapping[str, nn.Module]) -> set[str]:
    """The layers that a name refers to: the layer itself, or the layers inside it."""
    try:
        named = {id(module) for module in model.get_submodule(name).modules()}
    except AttributeError:
        named = set()
    inside = {path for path, layer in layers.items() if id(layer) in named}
    if not inside:
        raise UserError(
            f"{type(model).__name__} has no layer called {name!r}; its layers: {', '.join(list(layers)[-8:])}"
        )
    return inside


def _head_at(
    path: OutputPath,
    output: Any,
    layers: Mapping[str, nn.Module],
    recorded: Mapping[str, Tensor],
    run: Run,
    forms: tuple[Form, ...],
) -> Head | None:
    """The layers whose outputs are, or add up to, the logits at a path of the output."""
    logits = path.logits(output).detach()
    classes = logits.shape[1]
    wide = {
        name: rows
        for name, rows in recorded.items()
        if rows.shape[-1 if isinstance(layers[name], nn.Linear) else 1] == classes
    }

    def moved(names: Sequence[str], scale: Tensor, shift: Tensor) -> Tensor:
        with changed([layers[name] for name in names], scale, shift):
            return path.logits(run()).detach()

    for name, rows in reversed(wide.items()):
        rows = rows.flatten(1)
        for form in (MULTI_LABEL if classes == 1 else forms) if rows.shape == logits.shape else ():
            head = Head(path, (name,), (1.0,), form, single=classes == 1 and forms != MULTI_LABEL)
            same = torch.equal(rows, logits) if form == "logits" else close(head.formed(rows.float()), logits)
            # Outputs may be equal for these samples alone: a clamp, a branch by confidence.
            if same and follows(head, rows, moved([name], *probe(rows))):
                return head
    gains = _measured_gains(logits, wide, moved)
    head = Head(path, tuple(gains), tuple(gains.values()), single=classes == 1 and forms != MULTI_LABEL)
    if abs(sum(gains.values())) < 0.01 or not follows(head, logits, moved(head.layers, *probe(logits))):
        return None
    return head


def _measured_gains(
    logits: Tensor, names: Mapping[str, Tensor], moved: Callable[[Sequence[str], Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """The factor of each layer's output in the logits, for layers whose shift shifts all logits by one factor."""
    _, shift = probe(logits)
    share = 1e-4 if is_exact(logits) else 0.05
    gains: dict[str, float] = {}
    for name in names:
        change = moved([name], torch.ones_like(shift), shift).cpu().double() - logits.cpu().double()
        gain = float((change @ shift).mean() / shift.square().sum())
        error = float((change - gain * shift).abs().max())
        if abs(gain) > 0.01 and error <= share * float(shift.abs().max()) * max(1.0, abs(gain)):
            near = float(round(gain)) if abs(gain) >= 1 else 1 / round(1 / gain)  # n or 1/n, if it is that close
            gains[name] = near if abs(near - gain) <= min(share, 0.01) * abs(gain) else gain
    return gains


def _require_last(head: Head, output: Any, layers: Mapping[str, nn.Module], run: Run, name: str) -> None:
    """Raise if another tensor of the output is computed from the head: the head may give features, not logits."""
    logits = head.path.logits(output).detach()
    with changed([layers[path] for path in head.layers], *probe(logits)):
        again = run()
    for path in logits_paths(output, len(logits)):
        old, new = (path.logits(values).detach() for values in (output, again))
        if old.shape != logits.shape and not close(new, old):
            raise UserError(
                f"{name} returns several tensors ({shapes(output)}), and {path} is computed from the output of "
                f"{head.layers[-1]}: which are the logits? Name them as the entry 'logits', or their layer with head="
            )


def _completed(head: Head, layers: Mapping[str, nn.Module], run: Run, samples: int) -> Head:
    """The head, completed by recording its layers: their inputs, whether they are linear, how outputs are reduced."""
    head_layers = {path: layers[path] for path in head.layers}
    with recording(head_layers) as recorded:
        output = head.path.logits(run()).detach()
    for reduction in get_args(Reduction):
        head = replace(head, reduction=reduction)
        logits = None if reduction == "unknown" else head.sum_of(head_layers, recorded, output)
        if logits is not None and close(head.formed(logits), output):
            break
    features = [head_features(layer, recorded[path], samples) for path, layer in head_layers.items()]
    obstacles = [why_not_linear(layer, path, recorded[path]) for path, layer in head_layers.items()]
    return replace(
        head,
        has_features=all(one is not None for one in features),
        obstacle=next((reason for reason in obstacles if reason), ""),
    )


def _why_no_layer(model: nn.Module, output: Tensor) -> str:
    """Why a calibration cannot be folded into a layer; raises if the output (N, K) does not consist of logits."""
    name, values = type(model).__name__, output.cpu().double()
    if bool(((values >= 0) & (values <= 1)).all()):
        sums = (values.sum(1) - 1).abs() < (1e-3 if is_exact(output) else 1e-2)
        kind = "probabilities (each row sums to 1)" if bool(sums.all()) else "numbers between 0 and 1"
        raise UserError(f"{name} returns {kind}, and no layer outputs their logits; return the logits")
    quantised = [path for path, layer in model.named_modules() if ".quantized." in type(layer).__module__]
    if quantised:
        return f"its layers are quantised ({quantised[-1]}); calibrate before quantising"
    return (
        f"no linear layer or convolution of {name} outputs its logits, of shape {tuple(output.shape)} (does an "
        "activation or another operation follow the last layer?)"
    )
