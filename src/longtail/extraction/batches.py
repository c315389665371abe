"""Batches of anybody's loader: what of them goes into the model, and which part is the labels."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from longtail.backbones.inference import BATCH
from longtail.data.labels import LABEL_NAMES
from longtail.errors import UserError


def as_batches(loader: Any) -> Iterable[Any]:
    """Batches of a loader, of a list of batches, of a Hugging Face data set or of a torch `Dataset`."""
    if hasattr(loader, "with_format") and hasattr(loader, "iter"):  # datasets.Dataset, datasets.IterableDataset
        return loader.with_format("torch").iter(batch_size=BATCH)
    if isinstance(loader, Dataset):
        return DataLoader(loader, BATCH)
    if not isinstance(loader, Iterable):
        raise UserError(f"a {type(loader).__name__} gives no batches; pass a DataLoader or a list of batches")
    return loader


def split_batch(batch: Any, model: nn.Module, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Positional and named inputs of the model, and the labels (N,)."""
    if isinstance(batch, Mapping):
        named = {name: _move(value, device) for name, value in batch.items()}
        for name in LABEL_NAMES:
            if name in named:
                labels = named.pop(name)
                return *_taken(named, model), _class_numbers(labels)
        raise UserError(f"a batch has no labels: its entries are {', '.join(named)}; expected one of {LABEL_NAMES}")
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = _move(batch[0], device)
        if isinstance(inputs, Mapping):
            return *_taken(dict(inputs), model), _class_numbers(batch[1])
        return (inputs,), {}, _class_numbers(batch[1])
    raise UserError(f"a batch must be (inputs, labels) or a dictionary with labels, not {type(batch).__name__}")


def _taken(named: dict[str, Any], model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those entries that the model takes: by name, or the only one whatever its name."""
    parameters = inspect.signature(model.forward).parameters
    known = {name: value for name, value in named.items() if name in parameters}
    others = {name: value for name, value in named.items() if name not in known and isinstance(value, Tensor)}
    if known and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return (), {**known, **others}
    if known:
        return (), known
    if len(others) == 1:
        return tuple(others.values()), {}
    raise UserError(
        f"{type(model).__name__} takes {', '.join(parameters)}, but the entries of a batch are "
        f"{', '.join(named) or 'labels only'}; rename them"
    )


def _class_numbers(labels: Any) -> Tensor:
    numbers = torch.as_tensor(labels)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.ndim != 1 or numbers.is_floating_point():
        raise UserError(
            f"labels must be class numbers, one per sample, not {numbers.dtype} of shape {tuple(numbers.shape)}; "
            "argmax(1) makes them of one-hot labels"
        )
    return numbers


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _move(item, device) for name, item in value.items()}
    return value
