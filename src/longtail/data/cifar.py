"""Images held in memory: CIFAR-10 and CIFAR-100, in the python or the binary layout, and the digits of scikit-learn.

CIFAR is downloaded if it is asked for: verified by MD5 sum, resumed after a broken transfer.

The files of CIFAR's python layout are pickles. Their instructions are listed by the standard library and not executed:
the plain values among them are all that these files hold.

Data: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import pickletools
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.config import DataConfig
from longtail.data.images import MemoryImages
from longtail.data.tables import ReadSplits
from longtail.errors import UserError
from longtail.files.atomic import NO_SPACE, cache_folder
from longtail.files.progress import Display
from longtail.files.reading import expanded, read_bytes, read_text, reading, require_file, require_plain

MAX_BYTES = 1 << 28  # of a pickle; the largest file of CIFAR has 155 MB
MAX_NAMES_BYTES = 1 << 20  # of the pickle with the class names
MAX_KEY = 32  # characters
ROW = 3 * 32 * 32
TEXTS = {"BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES8"}
INTEGERS = {"BININT", "BININT1", "BININT2"}
BOOLEANS = {"NEWTRUE": True, "NEWFALSE": False}
STORED = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}  # a value is remembered, which changes nothing here


def scan_pickle(path: Path, keys: tuple[str, ...], *, max_bytes: int = MAX_BYTES) -> dict[str, list[Any]]:
    """The texts, numbers and truth values after each of these keys of a pickled dictionary; nothing is built or called.

    If a list follows the key, its items alone.
    """
    kind = "a CIFAR file, or is cut short or altered"
    content = read_bytes(path, kind, max_bytes=max_bytes)
    entries: dict[str, list[Any]] = {}
    values: list[Any] = []
    of_list = in_list = False
    previous = ""
    with reading(path, kind):
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name in STORED or argument == "latin1":  # Python 3 writes bytes as text and this encoding
                continue
            key: Any = argument if name in TEXTS and len(argument) < MAX_KEY else ""  # type: ignore[arg-type]
            key = key.decode("latin-1") if isinstance(key, bytes) else key
            if key in keys and not in_list:
                values, of_list = entries.setdefault(key, []), False
            elif name == "EMPTY_LIST":
                values = [] if of_list else values  # a second list belongs to another key
                of_list = in_list = True
            elif name == "MARK" and previous == "APPENDS":  # lists are written a thousand items at a time
                in_list = True
            elif name in ("APPEND", "APPENDS"):
                in_list = False
            elif in_list or not of_list:
                if name in TEXTS or name in INTEGERS:
                    values.append(argument)
                elif name in BOOLEANS:
                    values.append(BOOLEANS[name])
            previous = name
    return entries


@dataclass(frozen=True)
class Layout:
    """File names and keys of one layout of a data set."""

    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int = 0  # binary layout: bytes before the pixels; the last one is the label
    label_key: str = "labels"  # python layout
    names_key: str = "label_names"


CLASSES = {"cifar10": 10, "cifar100": 100}
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
BINARY_BATCHES = tuple(f"{name}.bin" for name in BATCHES)
LAYOUTS = {
    "cifar10": (
        Layout("cifar-10-batches-py", BATCHES, "test_batch", "batches.meta"),
        Layout("cifar-10-batches-bin", BINARY_BATCHES, "test_batch.bin", "batches.meta.txt", 1),
    ),
    "cifar100": (
        Layout("cifar-100-python", ("train",), "test", "meta", 0, "fine_labels", "fine_label_names"),
        Layout("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", 2),
    ),
}


def read_cifar(config: DataConfig, root: Path) -> ReadSplits:
    """CIFAR-10 or CIFAR-100 below `root`, pixels (N, 3, 32, 32) uint8."""
    classes = CLASSES[config.data]
    folder, layout = find_layout(config.data, root)
    names = _read_names(folder / layout.names, layout)
    if len(names) != classes:
        raise UserError(f"{folder / layout.names} names {len(names)} classes where {classes} are expected")
    splits = []
    for files, expected in ((layout.train, 50_000), ((layout.test,), 10_000)):
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
        if max(labels) >= classes:
            raise UserError(f"{folder} has label {max(labels)}, outside 0..{classes - 1}")
        splits.append(MemoryImages(labels=torch.tensor(labels), class_names=names, pixels=pixels.view(-1, 3, 32, 32)))
    return ReadSplits(splits[0], test=splits[1])


def find_layout(name: str, root: Path) -> tuple[Path, Layout]:
    """The folder that holds a data set: `root` itself or one below it, in either layout."""
    for layout in LAYOUTS[name]:
        for folder in (root / layout.folder, root):
            if (folder / layout.train[0]).is_file() and (folder / layout.names).is_file():
                return folder, layout
    folders = " or ".join(layout.folder for layout in LAYOUTS[name])
    raise UserError(
        f"{name} not found in {root}: it needs {folders} (give the folder above it with --root, or fetch it with "
        "--download)"
    )


def _read_file(path: Path, layout: Layout) -> tuple[np.ndarray, list[int]]:
    """Pixels (N, 3072) uint8 and the N labels of one file."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    if layout.label_bytes:
        size, width = require_file(path), layout.label_bytes + ROW
        if size == 0 or size % width or size > 50_000 * width:
            raise UserError(f"{path} is cut short or altered: {size} bytes are not {width} for each image")
        with reading(path, "a CIFAR file"):
            rows = np.fromfile(path, dtype=np.uint8).reshape(-1, width)
        return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].tolist()
    entries = scan_pickle(path, ("data", layout.label_key))
    labels, values = entries.get(layout.label_key, []), entries.get("data", [])
    if set(map(type, labels)) != {int} or not 0 <= min(labels) <= max(labels) < 256:
        raise UserError(f"{path} is not a CIFAR batch: {layout.label_key!r} should list labels")
    # NumPy stores version, shape, type, whether the order is Fortran's, and the content.
    size = ROW * len(labels)
    position = next((at for at, value in enumerate(values) if isinstance(value, str | bytes) and len(value) == size), 0)
    described = values[:position]
    truths = [value for value in described if isinstance(value, bool)]
    if not truths or "u1" not in described or (len(labels), ROW) not in pairwise(described):
        raise UserError(f"{path} is not a CIFAR batch: 'data' should be uint8 of shape ({len(labels)}, {ROW})")
    with reading(path, "a CIFAR batch"):
        content = values[position]
        pixels = np.frombuffer(content if isinstance(content, bytes) else content.encode("latin-1"), np.uint8)
    return pixels.reshape(-1, ROW, order="F" if truths[-1] else "C"), labels


def _read_names(path: Path, layout: Layout) -> tuple[str, ...]:
    if layout.label_bytes:
        return tuple(read_text(path, "a list of class names", max_bytes=MAX_NAMES_BYTES).split())
    names = scan_pickle(path, (layout.names_key,), max_bytes=MAX_NAMES_BYTES).get(layout.names_key, [])
    if not all(isinstance(name, str | bytes) for name in names):
        raise UserError(f"{path} is not a CIFAR file: {layout.names_key!r} should list the class names")
    return tuple(name if isinstance(name, str) else name.decode("utf-8", "replace") for name in names)


def read_digits(config: DataConfig, root: Path) -> ReadSplits:
    """The 1,797 handwritten digits of scikit-learn, pixels (N, 1, 8, 8) uint8; the test split has 60 of each digit."""
    # Read from scikit-learn's file, whose rows are 64 values 0..16 and the digit: its import would take seconds.
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    darkness, digits = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1]
    images = MemoryImages(
        labels=torch.from_numpy(digits.astype(np.int64)),
        class_names=tuple(str(digit) for digit in range(10)),
        pixels=torch.from_numpy((darkness * (255 / 16)).round().astype(np.uint8)),
    )
    rng = np.random.default_rng(0)
    of_class = [rng.permutation(np.flatnonzero(digits == digit)) for digit in range(10)]
    test = np.sort(np.concatenate([members[:60] for members in of_class]))
    return ReadSplits(images.subset(np.setdiff1d(np.arange(len(images)), test)), test=images.subset(test))


CHUNK = 1 << 20
ATTEMPTS = 5
MAX_ARCHIVE = 1 << 30  # largest size of an archive, packed or unpacked: CIFAR has 187 MB


ARCHIVES = {  # address and published MD5 sum
    "cifar10": ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "cifar100": ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}


def download_cifar(name: str, root: str | None, display: Display) -> Path:
    """Download a CIFAR data set to `root` unless it is there; returns the folder."""
    if name not in ARCHIVES:
        raise UserError(f"--download knows {' and '.join(ARCHIVES)}, not {name!r}")
    folder = expanded(root) if root else cache_folder()
    with suppress(UserError):
        return find_layout(name, folder)[0]
    url, md5 = ARCHIVES[name]
    packed = folder / url.rsplit("/", 1)[1]
    fetch(url, packed, md5, display)
    display.line(f"unpacking {packed}")
    unpack(packed, folder)
    return find_layout(name, folder)[0]


def unpack(packed: Path, folder: Path) -> None:
    """Unpack to a temporary folder and rename it, so that an interrupted unpacking leaves no partial folder."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        with reading(packed, "an archive of images"), tarfile.open(packed) as archive:
            unpacked = sum(item.size for item in archive)
            if unpacked > MAX_ARCHIVE:
                raise UserError(f"{packed} would unpack to {unpacked:,} bytes, more than CIFAR has; it is not unpacked")
            archive.extractall(temporary, filter="data")
        for item in Path(temporary).iterdir():
            target = folder / item.name
            if target.is_dir():
                shutil.rmtree(target)
            item.replace(target)


def fetch(url: str, path: Path, md5: str, display: Display, *, pause: float = 1.0) -> None:
    """Download `url` to `path`; a broken transfer is resumed, also in a later call."""
    if path.is_file() and _md5(path) == md5:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    require_plain(partial)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _transfer(url, partial, display)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise UserError(f"{url} cannot be fetched: {error}") from error
            if attempt == ATTEMPTS or getattr(error, "errno", None) in NO_SPACE:
                raise UserError(f"{url} cannot be fetched: {error}; run the same command again to continue") from error
            time.sleep(pause * attempt)
    if _md5(partial) != md5:
        partial.unlink()
        raise UserError(f"{url} did not arrive as published (its MD5 sum differs); nothing was kept, try again")
    os.replace(partial, path)


def _transfer(url: str, partial: Path, display: Display) -> None:
    """One attempt: request the missing bytes and append them."""
    done = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing
        raise
    with response:
        if done and response.status != http.client.PARTIAL_CONTENT:
            done = 0  # the server sends everything again
        given = response.headers.get("Content-Length", "0")
        left = int(given) if given.isdecimal() and len(given) < 20 else 0
        if done + left > MAX_ARCHIVE:
            raise UserError(f"{url} has {done + left:,} bytes, more than CIFAR; it is not fetched")
        with (
            partial.open("ab" if done else "wb") as file,
            display.task("fetching", done + left, done=done, unit="bytes") as task,
        ):
            while chunk := response.read(CHUNK):
                file.write(chunk)
                if file.tell() > MAX_ARCHIVE:
                    raise UserError(f"{url} does not end after {MAX_ARCHIVE:,} bytes; delete {partial}")
                task.advance(len(chunk))
                left -= len(chunk)
    if left > 0:
        raise OSError(f"the connection broke with {left} bytes missing")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
