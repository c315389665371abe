"""Batches of any loader: what goes into the model, and the labels.

One rule. The labels are the entry that `longtail.data.labels.label_key` names: the second of a pair, or the one with a
usual name. From a dictionary the model gets the entries that its `forward` names, or the only other tensor. From a
tuple it gets the entries before the labels: all of them if `forward` takes that many, the first if it takes one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from longtail.backbones import BATCH
from longtail.data.labels import Key, as_class_numbers, dataset_labels, label_key
from longtail.data.loading import Batch as ImageBatch
from longtail.data.loading import quiet_about_workers
from longtail.errors import UserError
from longtail.files.tensors import random_state_kept
from longtail.heads.attach import Attached
from longtail.heads.fold import unwrap
from longtail.outputs.checks import as_label_matrix
from longtail.outputs.loaders import ImageLoader

ARRAYS = Tensor | np.ndarray


@dataclass(frozen=True)
class ModelBatch:
    """The inputs of a model for one batch, by position and by name, and its labels."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor  # (N,), of a multi-label set (N, K)
    indices: Tensor | None = None  # (N,) the order of the samples among all, if the loader knows it
    repeated: bool = False  # whether the batch came before

    def only(self, rows: Tensor | slice) -> ModelBatch:
        """Some of its samples; all of them if an input does not have one entry per sample."""
        sizes: set[int] = set()
        _mapped((self.args, self.kwargs), lambda tensor: sizes.add(len(tensor) if tensor.ndim else -1))
        if sizes != {len(self.labels)}:
            return self
        args, kwargs = _mapped((self.args, self.kwargs), lambda tensor: tensor[rows].clone())
        return ModelBatch(args, kwargs, self.labels[rows])


def read_batches(loader: Any) -> Iterable[Any]:
    """Batches of a loader, of a list of batches, of a Hugging Face data set or of a torch `Dataset`."""
    if hasattr(loader, "with_format") and hasattr(loader, "iter"):  # of the library `datasets`, in memory or a stream
        return loader.with_format("torch").iter(batch_size=BATCH)
    if isinstance(loader, Dataset):
        return DataLoader(loader, BATCH)
    if not isinstance(loader, Iterable) or isinstance(loader, str | Mapping | ARRAYS):
        raise UserError(f"a {type(loader).__name__} gives no batches; pass a DataLoader or a list of batches")
    if isinstance(loader, tuple | list) and len(loader) == 2 and all(isinstance(one, ARRAYS) for one in loader):
        raise UserError("(inputs, labels) is one batch, not a loader; write [(inputs, labels)], a list of one batch")
    return loader.batches() if isinstance(loader, ImageLoader) else loader


def model_batches(
    batches: Iterable[Any], loader: Any, model: nn.Module, device: torch.device, *, multilabel: bool = False
) -> Iterator[ModelBatch]:
    """The batches of a loader as the model takes them, on its device."""
    key = None
    with quiet_about_workers():  # torch has warned when the loader was made
        iterator = iter(batches)
    for batch in iterator:
        if isinstance(batch, ImageBatch):
            yield ModelBatch((batch.images,), {}, batch.labels, batch.indices)
            continue
        if key is None:
            dataset = getattr(loader, "dataset", loader)
            is_mapped = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
            several = isinstance(batch, tuple | list | Mapping) and len(batch) > 2
            with random_state_kept():  # samples of the data set may be read
                listed = dataset_labels(dataset) if is_mapped and several and not multilabel else None
                key = label_key(batch, dataset, listed, multilabel=multilabel)
        split = split_batch(batch, model, device, key, multilabel=multilabel)
        if len(split.labels):
            yield split


def split_batch(
    batch: Any, model: nn.Module, device: torch.device, key: Key | None = None, *, multilabel: bool = False
) -> ModelBatch:
    """The inputs of the model, on its device, and the labels, which are at `key`."""
    key = label_key(batch, multilabel=multilabel) if key is None else key
    labels = as_label_matrix(batch[key]) if multilabel else torch.from_numpy(as_class_numbers(batch[key]))
    if isinstance(batch, Mapping):
        inputs: Any = {name: value for name, value in batch.items() if name != key}
    elif hasattr(batch, "_fields") or int(key) < 2:
        inputs = batch[0 if key else 1]
    else:
        inputs = tuple(batch[: int(key)])
        taken = _positional(model)
        if len(taken) == len(forward_parameters(model)) == 1:
            inputs = inputs[0]
        elif sum(one.default is one.empty for one in taken) != key:
            raise UserError(
                f"a batch has {key} entries before its labels, and {type(model).__name__} takes "
                f"{', '.join(forward_parameters(model))}: which go into it? Make it (input, labels), or "
                "((first, second, …), labels)"
            )
    inputs = _mapped(inputs, lambda tensor: tensor.to(device, non_blocking=True))
    if isinstance(inputs, Mapping):
        return ModelBatch(*_by_name(dict(inputs), model), labels)
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return ModelBatch(_by_position(inputs, model), {}, labels)
    return ModelBatch((inputs,), {}, labels)


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's `forward`, by name."""
    while isinstance(model, Attached):
        model = unwrap(model.model)
    return inspect.signature(model.forward).parameters


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    parameters = forward_parameters(model).values()
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _by_position(inputs: Sequence[Any], model: nn.Module) -> tuple[Any, ...]:
    """Several inputs as several arguments, or as the single argument that the model takes."""
    taken = _positional(model)
    if any(one.kind is one.VAR_POSITIONAL for one in forward_parameters(model).values()):
        return tuple(inputs)
    if sum(one.default is one.empty for one in taken) == 1 and len(inputs) > 1:
        return (inputs,)
    if len(inputs) > len(taken):
        raise UserError(
            f"a batch has {len(inputs)} inputs, and {type(model).__name__} takes {len(taken)}: "
            f"{', '.join(one.name for one in taken)}"
        )
    return tuple(inputs)


def _by_name(inputs: dict[str, Any], model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs that `forward` names; otherwise the only tensor."""
    parameters = forward_parameters(model)
    named = {name: value for name, value in inputs.items() if name in parameters}
    others = {name: value for name, value in inputs.items() if name not in named and isinstance(value, Tensor)}
    kinds = {parameter.kind for parameter in parameters.values()}
    wraps = kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}  # passes on all of its arguments
    if inspect.Parameter.VAR_KEYWORD in kinds and (named or wraps):
        return (), {**named, **others}
    if named:
        return (), named
    if len(others) == 1:
        return tuple(others.values()), {}
    raise UserError(
        f"{type(model).__name__} takes {', '.join(parameters)}, but the entries of a batch are "
        f"{', '.join(inputs) or 'labels only'}; rename them"
    )


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
