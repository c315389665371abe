"""Batches of any loader: what goes into the model, and the labels.

One rule. The labels are the entry that `longtail.data.counts.label_key` names: the second of a pair, or the one with a
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

from longtail.backbones.inference import BATCH
from longtail.data.counts import dataset_labels
from longtail.data.labels import Key, label_key
from longtail.data.loading import Batch as ImageBatch
from longtail.data.loading import quiet_about_workers
from longtail.errors import UserError
from longtail.files.tensors import random_state_kept
from longtail.heads.attach import Attached
from longtail.heads.layers import unwrap
from longtail.outputs.checks import as_label_matrix
from longtail.outputs.loaders import ImageLoader

ARRAYS = Tensor | np.ndarray


@dataclass(frozen=True)
class ModelBatch:
    """The inputs of a model for one batch.

    Args:
        args: positional inputs.
        kwargs: named inputs.
        labels: (N,), of a multi-label set (N, K).
        indices: (N,) the order of the samples among all, if the loader knows it.
        repeated: whether the batch came before.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor
    indices: Tensor | None = None
    repeated: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, rows: Tensor | slice) -> ModelBatch:
        """Some of its samples; all of them if an input does not have one entry per sample."""
        sizes: set[int] = set()
        _mapped((self.args, self.kwargs), lambda tensor: sizes.add(len(tensor) if tensor.ndim else -1))
        if sizes != {len(self)}:
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
            key = label_key(batch, multilabel=True) if multilabel else _label_key(batch, loader)
        yield split_batch(batch, model, device, key, multilabel=multilabel)


def split_batch(
    batch: Any, model: nn.Module, device: torch.device, key: Key | None = None, *, multilabel: bool = False
) -> ModelBatch:
    """The inputs of the model, on its device, and the labels, which are at `key`."""
    key = label_key(batch, multilabel=multilabel) if key is None else key
    labels = as_label_matrix(batch[key]) if multilabel else class_numbers(batch[key])
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


def _label_key(batch: Any, loader: Any) -> Key:
    """Where the labels are in the batches of a loader, of which this is one."""
    several = len(batch) > 2 if isinstance(batch, tuple | list) else isinstance(batch, Mapping)
    dataset = getattr(loader, "dataset", loader)
    if not several or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return label_key(batch)
    with random_state_kept():
        return label_key(batch, dataset, dataset_labels(dataset))


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
    if numbers.is_floating_point() and numbers.ndim == 1 and bool(((numbers == 0) | (numbers == 1)).all()):
        numbers = numbers.long()  # targets of a binary cross-entropy
    if numbers.ndim != 1 or numbers.is_floating_point():
        raise UserError(f"labels must be class numbers, one per sample, not {_described(numbers)}")
    return numbers


def _described(labels: Tensor) -> str:
    """Describes labels that are not class numbers, and what to do."""
    shape = f"{labels.dtype} of shape {tuple(labels.shape)}"
    if labels.ndim > 2:
        return f"{shape}: one class per pixel, as in segmentation, which is not calibrated here"
    if labels.ndim < 2:
        whole = labels.ndim == 1 and bool((labels == labels.round()).all())
        return f"{shape}: " + ("labels.long() makes whole numbers of them" if whole else "these are real numbers")
    ones = ((labels == 0) | (labels == 1)).all()
    per_sample = labels.sum(1)
    if bool(ones) and bool((per_sample == 1).all()):
        return f"{shape}; if every sample of the set has exactly one 1, labels.argmax(1) makes class numbers of them"
    if bool(ones):
        return (
            f"{shape} with several classes per sample (or none): multi-label data, which "
            "longtail.posthoc.MultiLabelCalibration calibrates"
        )
    if labels.is_floating_point() and bool(((per_sample - 1).abs() < 1e-3).all()):
        return f"{shape} that sum to 1, as mixup makes them: use a loader without it, whose labels are classes"
    return f"{shape}: several numbers per sample"


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
