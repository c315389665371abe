"""Outputs of a frozen model on one split: features, logits and labels, computed once and stored on disk.

Every post-hoc method, metric and figure reads this. A file is safetensors; it is written row by row and memory-mapped
when it is read, so that it can be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.files.records import FORMAT, as_record, format_of
from longtail.files.tensors import as_array, create, read
from longtail.heads.fold import gathered, unwrap
from longtail.outputs.checks import require_possible_counts, require_same_classes
from longtail.outputs.rows import LogitRows

KIND = "longtail outputs"
SHAPES = {  # N samples, K classes, D features
    "logits": "NK",
    "features": "ND",
    "head_weight": "KD",
    "head_bias": "K",
    "labels": "N",
    "indices": "N",
    "class_counts": "K",
    "group_counts": "K",
}


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs of one model on one split.

    Args:
        labels: (N,) int64.
        class_counts: (K,) images per class that the network was trained on.
        logits: (N, K), or None if they are computed from features and head.
        features: (N, D) input of the head, if known.
        head_weight: (K, D), if known.
        head_bias: (K,), if there is one.
        indices: (N,) index of each sample in its split.
        group_counts: (K,) images per class of the whole training set, before a part of it was held out: classes
            are many-, medium- or few-shot by these. None if they are `class_counts`.
        split: train, validation or test.
        views: augmented passes over the split, one after another; 0 means clean images.
        images_per_class: at most so many images of each class were used; None if all were used.
        images_seed: random seed that selected them; None if all were used.
        model: identity of the model: a hash of its weights.
        digest: hash of the list of samples.
        class_names: K names.
    """

    labels: np.ndarray
    class_counts: np.ndarray
    logits: np.ndarray | None = None
    features: np.ndarray | None = None
    head_weight: np.ndarray | None = None
    head_bias: np.ndarray | None = None
    indices: np.ndarray | None = None
    group_counts: np.ndarray | None = None
    split: str = "train"
    views: int = 0
    images_per_class: int | None = None
    images_seed: int | None = None
    model: str | None = None
    digest: str | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.logits is None and (self.features is None or self.head_weight is None):
            raise UserError("outputs need logits, or features and the head they go through")
        sizes: dict[str, int] = {}
        for name, dimensions in SHAPES.items():
            if getattr(self, name) is None:
                continue
            value = as_array(getattr(self, name))
            if value.ndim != len(dimensions):
                raise UserError(f"{name} of outputs must be of shape ({', '.join(dimensions)}), not {value.shape}")
            for dimension, size in zip(dimensions, value.shape, strict=True):
                if sizes.setdefault(dimension, size) != size:
                    raise UserError(
                        f"outputs have {dimension} = {sizes[dimension]}, but {name} is of shape {value.shape}"
                    )
            if name in ("head_weight", "head_bias") and (value.dtype.kind not in "fiu" or not np.isfinite(value).all()):
                raise UserError(f"{name} of outputs must be finite real numbers")
            if name in ("labels", "class_counts", "group_counts"):
                whole = value.dtype.kind in "iubf" and bool((value == np.floor(value)).all())
                if not whole or (name != "labels" and (value < 0).any()):
                    meaning = "classes" if name == "labels" else "training samples"
                    raise UserError(f"{name} must be whole numbers of {meaning}, not {value[:8]}")
                if name != "labels":
                    require_possible_counts(value, name)
                value = value.astype(np.int64, copy=False)
            object.__setattr__(self, name, value)
        if self.class_names and len(self.class_names) != sizes["K"]:
            raise UserError(f"outputs have {sizes['K']} classes, but {len(self.class_names)} class names")

    def __repr__(self) -> str:
        """What they are in one line; the arrays may be larger than memory."""
        held = [name for name in ("features", "logits", "head_weight") if getattr(self, name) is not None]
        classes = len(self.class_counts)
        return f"Outputs({self.split}: {len(self):,} samples, {classes:,} classes; {', '.join(held)})"

    def __len__(self) -> int:
        return len(self.labels)

    def __eq__(self, other: object) -> bool:
        """Whether all fields of two records are equal."""
        if not isinstance(other, Outputs):
            return NotImplemented
        return all(np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]  # it holds arrays

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)

    @property
    def names(self) -> tuple[str, ...]:
        """(K,) names of the classes, or their numbers if the names are unknown."""
        return self.class_names or tuple(str(label) for label in range(self.num_classes))

    @property
    def missing_classes(self) -> list[str]:
        """Names of the classes without a sample."""
        counts = np.bincount(self.labels, minlength=self.num_classes)
        return [self.names[label] for label in np.flatnonzero(counts == 0)]

    @property
    def counts_for_groups(self) -> np.ndarray:
        """(K,) counts by which classes are many-, medium- or few-shot."""
        return self.class_counts if self.group_counts is None else self.group_counts

    @cached_property
    def weight_norms(self) -> np.ndarray:
        """(K,) norms of the head's class vectors; 1 if the head is unknown."""
        if self.head_weight is None:
            return np.ones(self.num_classes)
        # Without a copy in float64, which many classes would notice.
        return np.sqrt(np.einsum("kd,kd->k", self.head_weight, self.head_weight, dtype=np.float64))

    def rows(self) -> LogitRows:
        """The logits, to be read in chunks: stored, or computed from the features."""
        if self.logits is not None:
            return LogitRows(self.logits)
        assert self.features is not None and self.head_weight is not None  # noqa: PT018 - checked in __post_init__
        weight = torch.from_numpy(self.head_weight).float()
        bias = None if self.head_bias is None else torch.from_numpy(self.head_bias).float()
        return LogitRows(self.features, weight, bias)

    def with_counts_of(self, train: Outputs) -> Outputs:
        """A copy with the class counts of the training outputs and, if unknown here, their head and names."""
        require_same_classes(train.names, self.names)
        head = self if self.head_weight is not None else train
        return replace(
            self,
            class_counts=train.class_counts,
            group_counts=train.group_counts,
            class_names=self.class_names or train.class_names,
            head_weight=head.head_weight,
            head_bias=head.head_bias,
        )

    def save(self, path: Path | str) -> None:
        """Write to a file, atomically."""
        tensors = {name: getattr(self, name) for name in SHAPES if getattr(self, name) is not None}
        shapes = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        header = Header(**{field.name: getattr(self, field.name) for field in fields(Header)})
        with create(Path(path), shapes, header.to_dict()) as arrays:
            for name, value in tensors.items():
                arrays[name][...] = value

    @classmethod
    def open(cls, path: Path | str, *, model: str | None = None) -> Outputs:
        """Open a memory-mapped file; with `model`, raises if the outputs belong to another model."""
        path = Path(path)
        arrays, details = read(path)
        if details.get("kind") != KIND:
            raise UserError(f"{path} holds no outputs of a model")
        if format_of(details, path) == 0:
            raise UserError(f"{path} was written by an older longtail; delete it and extract the outputs again")
        header = as_record(Header, details, path)
        if model is not None and header.model != model:
            raise UserError(
                f"{path} was computed with another model ({str(header.model)[:12]}, not {model[:12]}); "
                "delete it or choose another file"
            )
        if not {"labels", "class_counts"} <= arrays.keys() <= set(SHAPES):
            raise UserError(f"{path} is damaged: its arrays are {', '.join(sorted(arrays))[:80]}")
        # Only features and logits, the large arrays, stay on disk.
        kept = {name: arrays[name] if name in ("logits", "features") else np.array(arrays[name]) for name in arrays}
        return cls(**kept, **asdict(header))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Header:
    """The header of a file of outputs: fields of `Outputs`."""

    split: str
    views: int = 0
    model: str | None = None
    digest: str | None = None
    class_names: tuple[str, ...] = ()
    images_per_class: int | None = None
    images_seed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": KIND, **asdict(self)}


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights: equal weights have equal hashes, whatever file they came from."""
    return hash_of(sorted(unwrap(model).state_dict().items(), key=itemgetter(0)))


def hash_of(named: Iterable[tuple[str, Any]]) -> str:
    """A hash of named tensors; other values are skipped."""
    digest = hashlib.sha256()
    for name, value in named:
        if not isinstance(value, Tensor):
            continue
        plain = gathered(value).cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(np.ascontiguousarray(plain.reshape(-1).view(torch.uint8).numpy()).data)
    return digest.hexdigest()
