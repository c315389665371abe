"""Batches of any loader: which parts are the inputs of the model, and which part is the labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from longtail.core.random_state import random_state_kept
from longtail.data.counts import dataset_labels
from longtail.data.label_entry import Key, label_key
from longtail.errors import UserError
from longtail.networks.attached import Attached
from longtail.networks.head import unwrap


@dataclass(frozen=True)
class Batch:
    """Positional and named inputs of the model, and the labels (N,)."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, rows: Tensor | slice) -> Batch:
        """Some of its samples; all of them if an input does not have one entry per sample."""
        sizes: list[int] = []
        _mapped((self.inputs, self.named), lambda tensor: sizes.append(len(tensor) if tensor.ndim else -1))
        if set(sizes) != {len(self)}:
            return self
        inputs, named = _mapped((self.inputs, self.named), lambda tensor: tensor[rows].clone())
        return Batch(inputs, named, self.labels[rows])


def split_batch(batch: Any, model: nn.Module, device: torch.device, key: Key | None = None) -> Batch:
    """The inputs of the model, on its device, and the labels, which are at `key`."""
    key = label_key(batch) if key is None else key
    labels = class_numbers(batch[key])
    if isinstance(batch, Mapping):
        named = {name: _move(value, device) for name, value in batch.items() if name != key}
        return Batch(*_taken(named, model), labels)
    inputs = _move(_before(batch, int(key), model), device)
    if isinstance(inputs, Mapping):
        return Batch(*_taken(dict(inputs), model), labels)
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return Batch(_spread(inputs, model), {}, labels)
    return Batch((inputs,), {}, labels)


def key_for(batch: Any, source: Any) -> Key:
    """Where the labels are in the batches of a loader or data set, of which this is one."""
    several = len(batch) > 2 if isinstance(batch, tuple | list) else isinstance(batch, Mapping)
    dataset = getattr(source, "dataset", source)
    if not several or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return label_key(batch)
    with random_state_kept():
        return label_key(batch, dataset, dataset_labels(dataset))


def _before(batch: Sequence[Any], key: int, model: nn.Module) -> Any:
    """The inputs in a batch whose labels are at place `key`: its first entry, or all that the model needs."""
    if hasattr(batch, "_fields") or key < 2:
        return batch[0 if key else 1]
    parameters, places = forward_of(model), _places(model)
    if len(places) == len(parameters) == 1:
        return batch[0]
    if sum(one.default is one.empty for one in places) == key:
        return tuple(batch[:key])
    raise UserError(
        f"a batch has {key} entries before its labels, and {type(model).__name__} takes {', '.join(parameters)}: which "
        "go into it? Make it (input, labels), or ((first, second, …), labels)"
    )


def forward_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The inputs of a model by name."""
    while isinstance(model, Attached):
        model = unwrap(model.model)
    return inspect.signature(model.forward).parameters


def _places(model: nn.Module) -> list[inspect.Parameter]:
    """The positional inputs of a model."""
    parameters = forward_of(model).values()
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _spread(inputs: Sequence[Any], model: nn.Module) -> tuple[Any, ...]:
    """Several inputs as several arguments, or as the single argument that the model takes."""
    places = _places(model)
    if any(one.kind is one.VAR_POSITIONAL for one in forward_of(model).values()):
        return tuple(inputs)
    if sum(one.default is one.empty for one in places) == 1 and len(inputs) > 1:
        return (inputs,)
    if len(inputs) > len(places):
        raise UserError(
            f"a batch has {len(inputs)} inputs, and {type(model).__name__} takes {len(places)}: "
            f"{', '.join(one.name for one in places)}"
        )
    return tuple(inputs)


def _taken(named: dict[str, Any], model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The entries that the model takes: by name, or the only entry under any name."""
    parameters = forward_of(model)
    known = {name: value for name, value in named.items() if name in parameters}
    others = {name: value for name, value in named.items() if name not in known and isinstance(value, Tensor)}
    kinds = {parameter.kind for parameter in parameters.values()}
    wraps = kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}  # passes on all of its arguments
    if inspect.Parameter.VAR_KEYWORD in kinds and (known or wraps):
        return (), {**known, **others}
    if known:
        return (), known
    if len(others) == 1:
        return tuple(others.values()), {}
    raise UserError(
        f"{type(model).__name__} takes {', '.join(parameters)}, but the entries of a batch are "
        f"{', '.join(named) or 'labels only'}; rename them"
    )


def class_numbers(labels: Any) -> Tensor:
    """Labels (N,) as whole numbers; for other labels, the error says what they are."""
    if isinstance(labels, Mapping) or (isinstance(labels, Sequence) and any(isinstance(x, Mapping) for x in labels)):
        raise UserError(f"the labels of a batch are a dictionary ({type(labels).__name__}), not one class per sample")
    array = labels if isinstance(labels, Tensor) else np.asarray(labels)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "iufb":
        example = next(iter(array.ravel().tolist()), None)
        raise UserError(
            f"labels are {type(example).__name__} ({example!r}), not class numbers; give each class the number of its "
            "column in the model's output, starting at 0"
        )
    numbers = torch.as_tensor(array)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.ndim != 1 or numbers.is_floating_point():
        raise UserError(f"labels must be class numbers, one per sample, not {_described(numbers)}")
    return numbers


def _described(labels: Tensor) -> str:
    """Describes labels that are not class numbers, and what to do."""
    shape = f"{labels.dtype} of shape {tuple(labels.shape)}"
    if labels.ndim > 2:
        return f"{shape}: one class per pixel or place, as in segmentation, which is not calibrated here"
    if labels.ndim < 2:
        whole = labels.ndim == 1 and bool((labels == labels.round()).all())
        return f"{shape}: " + ("labels.long() makes whole numbers of them" if whole else "these are real numbers")
    ones = ((labels == 0) | (labels == 1)).all()
    per_sample = labels.sum(1)
    if bool(ones) and bool((per_sample == 1).all()):
        return f"{shape}; if every sample of the set has exactly one 1, labels.argmax(1) makes class numbers of them"
    if bool(ones):
        return f"{shape} with several classes per sample (or none): multi-label data, which is not calibrated here"
    if labels.is_floating_point() and bool(((per_sample - 1).abs() < 1e-3).all()):
        return f"{shape} that sum to 1, as mixup makes them: use a loader without it, whose labels are classes"
    return f"{shape}: several numbers per sample"


def _move(value: Any, device: torch.device) -> Any:
    return _mapped(value, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A structure of dictionaries, lists and tuples with every tensor, or array of numbers, in it changed."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value
