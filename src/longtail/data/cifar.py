"""CIFAR-10 and CIFAR-100 from their published files, in the python or the binary layout.

The files of the python layout are pickles. They are read without running anything: the reader accepts only the
instructions and the names that these files use, and a name becomes a record that does nothing.

Data: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from longtail.data.images import MemoryImages
from longtail.errors import UserError
from longtail.files.reading import read_bytes, read_text, reading, require_file

MAX_BYTES = 1 << 28  # of a pickle; the largest file of CIFAR has 155 MB
MAX_NAMES_BYTES = 1 << 20  # of the pickle with the class names
ROW = 3 * 32 * 32
NAMES = {
    "numpy.core.multiarray._reconstruct": "array",
    "numpy._core.multiarray._reconstruct": "array",
    "numpy.ndarray": "array type",
    "numpy.dtype": "dtype",
    "_codecs.encode": "bytes",
}


class _Record:
    """What a pickle asks for by name: one of `NAMES`, the arguments of its call, and its state."""

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _TextKeys(dict[Any, Any]):
    """A dictionary of named entries. The hash of a tuple of a million levels would end the process."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes | _Record):
            raise ValueError("a dictionary has keys that are not text")
        super().__setitem__(key, value)


PURE_UNPICKLER: Any = pickle._Unpickler  # the one written in Python, whose opcodes can be chosen
OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "BUILD"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
)


class _PlainUnpickler(PURE_UNPICKLER):
    """Reads plain values and records. The C unpickler would allocate whatever size of memo the file asks for."""

    def find_class(self, module: str, name: str) -> _Record:
        if f"{module}.{name}" not in NAMES:
            raise ValueError(f"it asks for {module}.{name}")
        return _Record(NAMES[f"{module}.{name}"])

    def load_call(self) -> None:
        arguments, called = self.stack.pop(), self.stack[-1]
        if not isinstance(called, _Record) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is not a function")
        self.stack[-1] = _Record(called.kind, arguments)

    def load_dictionary(self) -> None:
        self.append(_TextKeys())

    dispatch: ClassVar = {
        **{code: PURE_UNPICKLER.dispatch[code] for name in OPCODES for code in getattr(pickle, name)},
        pickle.REDUCE[0]: load_call,
        pickle.EMPTY_DICT[0]: load_dictionary,
    }


def load_plain_pickle(path: Path, *, most: int = MAX_BYTES) -> dict[str, Any]:
    """The entries of a pickled dictionary of at most so many bytes; nothing that the file names is called."""
    kind = "a CIFAR file, or is cut short or altered"
    content = read_bytes(path, kind, most=most)
    with reading(path, kind):
        entries = _PlainUnpickler(BytesIO(content), encoding="bytes").load()
        if not isinstance(entries, dict):
            raise ValueError("it holds no dictionary")
        return {_text(key): value for key, value in entries.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _bytes(value).decode("utf-8", "replace")


def _bytes(value: Any) -> bytes:
    """Bytes; Python 3 writes them for older readers as a text to be encoded."""
    match value:
        case bytes():
            return value
        case _Record(kind="bytes", arguments=(str() as text, "latin1" | "latin-1")):
            return text.encode("latin-1")
    raise ValueError(f"it holds {type(value).__name__} where bytes are expected")


def _byte_array(value: Any) -> np.ndarray:
    """The uint8 array that a record describes by the state that NumPy stores: version, shape, type, order, content."""
    match value:
        case _Record(
            kind="array",
            state=(1, tuple() as shape, _Record(kind="dtype", arguments=("u1" | b"u1", *_)), (0 | 1) as order, data),
        ):
            content = _bytes(data)
            if not all(type(extent) is int and extent >= 0 for extent in shape) or len(shape) > 4:
                raise ValueError("an array has an impossible shape")
            if math.prod(shape) != len(content):
                raise ValueError(f"an array of shape {shape} has {len(content)} bytes")
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if order else "C")
    raise ValueError("its images are not an array of bytes")


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
            rows, file_labels = _read_file(folder / file, layout)
            remaining = pixels.numpy()[len(labels) :]
            remaining[: len(rows)] = rows[: len(remaining)]
            labels.extend(file_labels)
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
    content = load_plain_pickle(path)
    with reading(path, "a CIFAR batch"):
        pixels, labels = _byte_array(content["data"]), content[layout.label_key]
    if pixels.shape[1:] != (ROW,):
        raise UserError(f"{path} is not a CIFAR batch: 'data' should be uint8 of shape (N, {ROW})")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not _are_labels(labels):
        raise UserError(f"{path} is not a CIFAR batch: {layout.label_key!r} should list {len(pixels)} labels")
    return pixels, labels


def _are_labels(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 256


def _read_names(cifar: Cifar, folder: Path, layout: Layout) -> tuple[str, ...]:
    path = folder / layout.names
    names: Any = read_text(path, "a list of class names", most=MAX_NAMES_BYTES).split() if layout.binary else None
    if names is None:
        names = load_plain_pickle(path, most=MAX_NAMES_BYTES).get(layout.names_key)
        if not isinstance(names, list):
            raise UserError(f"{path} is not a CIFAR file: {layout.names_key!r} should list the class names")
    if len(names) != cifar.classes:
        raise UserError(f"{path} names {len(names)} classes where {cifar.classes} are expected")
    with reading(path, "a CIFAR file"):
        return tuple(map(_text, names))
