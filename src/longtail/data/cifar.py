"""CIFAR-10 and CIFAR-100 in either of their two published layouts.

The python layout is a pickle, which can run any code when it is loaded; `plain_pickle` reads it without running code.

Data: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.core.reading import read_text, reading, require_file
from longtail.data.images import MemoryImages
from longtail.data.plain_pickle import load_plain_pickle
from longtail.errors import UserError

ROW = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """File names and keys of one layout of the data set."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    label_bytes: int = 1  # binary layout: bytes before the pixels; the last one is the label
    label_key: str = "labels"  # python layout
    names_key: str = "label_names"

    @property
    def binary(self) -> bool:
        return self.train[0].endswith(".bin")


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets: its size and its layouts."""

    name: str
    classes: int
    python: Layout
    binary: Layout


TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFARS = {
    "cifar10": Cifar(
        "cifar10",
        10,
        Layout("cifar-10-batches-py", TEN, ("test_batch",), "batches.meta"),
        Layout("cifar-10-batches-bin", tuple(f"{n}.bin" for n in TEN), ("test_batch.bin",), "batches.meta.txt"),
    ),
    "cifar100": Cifar(
        "cifar100",
        100,
        Layout(
            "cifar-100-python", ("train",), ("test",), "meta", label_key="fine_labels", names_key="fine_label_names"
        ),
        Layout("cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", label_bytes=2),
    ),
}


def read_cifar(name: str, root: Path) -> tuple[MemoryImages, MemoryImages]:
    """(train, test) of `cifar10` or `cifar100` below `root`, pixels (N, 3, 32, 32) uint8."""
    cifar = CIFARS[name]
    folder, layout = find_layout(cifar, root)
    names = _read_names(cifar, folder, layout)
    splits = []
    for files, expected in ((layout.train, 50_000), (layout.test, 10_000)):
        # Memory of torch: NumPy asks the system for huge pages, which can take it most of a second to find.
        pixels = torch.empty(expected, ROW, dtype=torch.uint8)
        labels: list[int] = []
        for file in files:  # one at a time, so that each takes the memory of the one before
            rows, own = _read_file(folder / file, layout)
            room = pixels.numpy()[len(labels) :]
            room[: len(rows)] = rows[: len(room)]
            labels.extend(own)
        if len(labels) != expected:
            raise UserError(f"{folder} holds {len(labels)} images where {expected} are expected: a file is cut short")
        if max(labels) >= cifar.classes:
            raise UserError(f"{folder} has label {max(labels)}, outside 0..{cifar.classes - 1}")
        splits.append(MemoryImages(labels=torch.tensor(labels), class_names=names, pixels=pixels.view(-1, 3, 32, 32)))
    return splits[0], splits[1]


def find_layout(cifar: Cifar, root: Path) -> tuple[Path, Layout]:
    """The folder that holds the data: `root` itself or one below it, in either layout."""
    for layout in (cifar.python, cifar.binary):
        for folder in (root / layout.folder, root):
            if (folder / layout.train[0]).is_file() and (folder / layout.names).is_file():
                return folder, layout
    raise UserError(
        f"{cifar.name} not found in {root}: it needs {cifar.python.folder} or {cifar.binary.folder} "
        f"(give the folder above it with --root, or fetch it with --download)"
    )


def _read_file(path: Path, layout: Layout) -> tuple[np.ndarray, list[int]]:
    """Pixels (N, 3072) uint8 and the N labels of one file."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if layout.binary:
        size, width = require_file(path), layout.label_bytes + ROW
        if size == 0 or size % width or size > 50_000 * width:
            raise UserError(f"{path} is cut short or altered: {size} bytes are not {width} for each image")
        with reading(path, "a CIFAR file"):
            rows = np.fromfile(path, dtype=np.uint8).reshape(-1, width)
        return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].tolist()
    content = _entries(load_plain_pickle(path))
    pixels, labels = content.get("data"), content.get(layout.label_key)
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (ROW,)):
        raise UserError(f"{path} is not a CIFAR batch: 'data' should be uint8 of shape (N, {ROW})")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not _are_labels(labels):
        raise UserError(f"{path} is not a CIFAR batch: {layout.label_key!r} should list {len(pixels)} labels")
    return pixels, labels


def _are_labels(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 256


def _read_names(cifar: Cifar, folder: Path, layout: Layout) -> tuple[str, ...]:
    path = folder / layout.names
    if layout.binary:
        names = tuple(read_text(path, "a list of class names").split())
    else:
        raw = _entries(load_plain_pickle(path)).get(layout.names_key)
        if not isinstance(raw, list) or not all(isinstance(name, str | bytes) for name in raw):
            raise UserError(f"{path} is not a CIFAR file: {layout.names_key!r} should list the class names")
        names = tuple(_text(name) for name in raw)
    if len(names) != cifar.classes:
        raise UserError(f"{path} names {len(names)} classes where {cifar.classes} are expected")
    return names


def _entries(content: Any) -> dict[str, Any]:
    """A dictionary with text keys: Python 2 wrote byte strings."""
    if not isinstance(content, dict):
        return {}
    return {_text(key): value for key, value in content.items()}


def _text(word: str | bytes) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else word
