"""What a frozen model says about one split: features, logits and labels, on disk, computed once.

Every post-hoc method, metric and figure reads this. A file is safetensors; it is written row by
row and memory-mapped when read, so a set larger than memory works.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.core.arrays import as_array
from longtail.core.mapped import create, read
from longtail.distributed.world import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.outputs.rows import LogitRows

KIND = "longtail outputs"


@dataclass(frozen=True)
class Outputs:
    """Outputs of one model on one split.

    Args:
        labels: (N,) int64.
        class_counts: (K,) training images per class.
        logits: (N, K), or None if they are to be computed from features and head.
        features: (N, D) that the head sees, if known.
        head_weight: (K, D), if known.
        head_bias: (K,), if there is one.
        indices: (N,) place of each sample in its split.
        split: train, validation or test.
        views: augmented passes over the split, one after another; 0 means clean images.
        model: fingerprint of the model's weights.
        class_names: K names.
        world: processes that share the work on these outputs.
    """

    labels: np.ndarray
    class_counts: np.ndarray
    logits: np.ndarray | None = None
    features: np.ndarray | None = None
    head_weight: np.ndarray | None = None
    head_bias: np.ndarray | None = None
    indices: np.ndarray | None = None
    split: str = "train"
    views: int = 0
    model: str | None = None
    class_names: tuple[str, ...] = ()
    world: World = field(default=SINGLE_PROCESS, repr=False)

    def __post_init__(self) -> None:
        for name in _TENSORS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_array(getattr(self, name)))
        if self.logits is None and (self.features is None or self.head_weight is None):
            raise UserError("outputs need logits, or features and the head they go through")
        for name in ("logits", "features", "head_weight"):
            value = getattr(self, name)
            if value is not None and value.ndim != 2:
                raise UserError(f"{name} of outputs must have two dimensions, not shape {value.shape}")
        known = self.rows().shape[1]
        for name in ("class_counts", "head_weight", "head_bias"):
            value = getattr(self, name)
            if value is not None and len(value) != known:
                raise UserError(f"outputs have {known} classes, but {name} is of {len(value)}")
        for name, meaning in (("labels", "classes"), ("class_counts", "training samples")):
            value = getattr(self, name)
            whole = value.dtype.kind in "iubf" and bool((value == np.floor(value)).all())
            if not whole or (name == "class_counts" and (value < 0).any()):
                raise UserError(f"{name} must be whole numbers of {meaning}, not {value[:8]}")
            object.__setattr__(self, name, value.astype(np.int64, copy=False))
        for name in ("logits", "features", "indices"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.labels):
                raise UserError(f"outputs have {len(self.labels)} labels but {len(value)} rows of {name}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)

    @cached_property
    def weight_norms(self) -> np.ndarray:
        """(K,) norms of the head's class vectors; 1 where the head is not known."""
        if self.head_weight is None:
            return np.ones(self.num_classes)
        return np.linalg.norm(self.head_weight.astype(np.float64), axis=1)

    def rows(self) -> LogitRows:
        """Logits to be read in chunks: stored, or computed from the features."""
        if self.logits is not None:
            return LogitRows(self.logits)
        assert self.head_weight is not None  # __post_init__ saw to it
        weight = torch.from_numpy(self.head_weight).float()
        bias = None if self.head_bias is None else torch.from_numpy(self.head_bias).float()
        return LogitRows(features=self.features, weight=weight, bias=bias)

    def with_counts_of(self, train: Outputs) -> Outputs:
        """The same, with the class counts and, if it is not known here, the head of the training outputs."""
        head = self if self.head_weight is not None else train
        counts = train.class_counts
        return replace(self, class_counts=counts, head_weight=head.head_weight, head_bias=head.head_bias)

    def save(self, path: Path | str) -> None:
        """Write to a file, atomically."""
        tensors = {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}
        shapes = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        with create(Path(path), shapes, self._header()) as arrays:
            for name, value in tensors.items():
                arrays[name][...] = value

    def _header(self) -> dict[str, Any]:
        return header(self.split, self.views, self.model, self.class_names)

    @classmethod
    def open(cls, path: Path | str, *, model: str | None = None, world: World = SINGLE_PROCESS) -> Outputs:
        """Map a file; with `model`, refuse outputs that belong to another."""
        arrays, details = read(Path(path))
        if details.get("kind") != KIND:
            raise UserError(f"{path} holds no outputs of a model")
        if model is not None and details["model"] != model:
            raise UserError(
                f"{path} was computed with another model ({str(details['model'])[:12]}, not {model[:12]}); "
                "delete it or choose another file"
            )
        # Only what grows with both samples and width stays on disk.
        kept = {name: arrays[name] if name in ("logits", "features") else np.array(arrays[name]) for name in arrays}
        return cls(
            **kept,
            split=details["split"],
            views=details["views"],
            model=details["model"],
            class_names=tuple(details["class_names"]),
            world=world,
        )


_TENSORS = ("labels", "indices", "class_counts", "head_weight", "head_bias", "features", "logits")


def header(split: str, views: int, model: str | None, class_names: tuple[str, ...]) -> dict[str, Any]:
    return {"kind": KIND, "split": split, "views": views, "model": model, "class_names": list(class_names)}
