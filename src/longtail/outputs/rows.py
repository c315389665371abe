"""Rows of outputs: read a chunk at a time (stored, mapped from a file, or computed from features), and written.

They are collected batch by batch, in memory or in files, and joined into one file in sample order.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.distributed import World
from longtail.errors import UserError
from longtail.files.atomic import remove_unfinished
from longtail.files.tensors import create, writable

CHUNK_NUMBERS = 1 << 19  # logits in a chunk: 2 MB in float32
COMPUTED_NUMBERS = 1 << 20  # for logits computed from features: a larger matrix product is faster
CHUNK_ROWS = 2048  # with more rows, sums of float32 numbers over a chunk would lose precision
STEP_ROWS = 64  # computed chunks have a multiple of so many rows: a product of odd sizes takes up to twice as long


@dataclass(eq=False)
class LogitRows:
    """Logits (N, K) read in float32 chunks: stored, or computed from features and a linear head.

    Args:
        array: logits (N, K), or features (N, D) with a weight; an array or tensor of any type, also memory-mapped.
        weight: (K, D) of the head, with features.
        bias: (K,) of the head, with features; or added to the logits.
        chosen: (N,) rows of the array to use; all if omitted.
    """

    array: np.ndarray | Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    chosen: np.ndarray | None = None

    def __post_init__(self) -> None:
        classes = self.array.shape[1] if self.weight is None else len(self.weight)
        self.shape = (len(self.array if self.chosen is None else self.chosen), classes)
        if self.weight is None:
            rows = max(CHUNK_NUMBERS // max(classes, 1), 1)
        else:
            rows = max(COMPUTED_NUMBERS // classes // STEP_ROWS, 1) * STEP_ROWS
        self.chunk_rows = min(rows, CHUNK_ROWS)

    def only(self, chosen: np.ndarray) -> LogitRows:
        """Some of the rows, by their numbers; nothing is copied, and rows are read when they are needed."""
        return replace(self, chosen=chosen if self.chosen is None else self.chosen[chosen])

    def plus(self, offset: Tensor) -> LogitRows:
        """The same logits with an offset (K,) added."""
        return replace(self, bias=offset.float() if self.bias is None else self.bias + offset.float())

    @property
    def stored(self) -> LogitRows:
        """The array that is read: the logits themselves, or the features they are computed from."""
        return LogitRows(self.array, chosen=self.chosen)

    def read(self, rows: slice | np.ndarray, out: Tensor | None = None) -> Tensor:
        """Logits of some rows, (B, K) float32; computed ones are put into the first rows of `out`, if given."""
        chunk = writable(self.array[rows if self.chosen is None else self.chosen[rows]]).to(torch.float32)
        if self.weight is None:
            return chunk if self.bias is None else chunk + self.bias
        # Class by class: with thousands of classes a product of this shape is 1.6 times as fast as `linear`.
        into = None if out is None else out[: len(chunk)].T
        if self.bias is None:
            return torch.mm(self.weight, chunk.T, out=into).T
        return torch.addmm(self.bias.unsqueeze(1), self.weight, chunk.T, out=into).T

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """An empty chunk (B, K), in memory as `read` returns them: stored ones by row, computed ones by class."""
        rows, classes = self.chunk_rows, self.shape[1]
        if self.weight is None:
            return torch.empty(rows, classes, dtype=dtype)
        return torch.empty(classes, rows, dtype=dtype).T

    def of_labels(self, rows: slice, labels: Tensor) -> Tensor:
        """The logit of each row's true class, (B,) float64; from features this costs no pass over all classes."""
        if self.weight is None:
            return self.read(rows).gather(1, labels.unsqueeze(1)).squeeze(1).double()
        logits = (self.stored.read(rows).double() * self.weight[labels].double()).sum(1)
        return logits if self.bias is None else logits + self.bias[labels].double()

    def slices(self, first: int = 0, last: int | None = None) -> Iterator[slice]:
        """The rows of each chunk from `first` to `last`."""
        stop = self.shape[0] if last is None else last
        for start in range(first, stop, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, stop))

    def chunks(
        self, first: int = 0, last: int | None = None, out: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of rows from `first` to `last`; with `out`, a `buffer`, each may be overwritten by the next."""
        for rows in self.slices(first, last):
            yield rows, self.read(rows, out)


COPIED_ROWS = 8192


@dataclass
class RowStore:
    """Collects the rows of several arrays batch by batch, in memory or in files of a folder."""

    dtype: np.dtype  # in which floating-point numbers are stored
    folder: Path | None = None  # of the files; None for memory
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)  # of files without rows: type and width alone

    def add(self, batch: dict[str, np.ndarray]) -> None:
        """Add the rows of one batch."""
        for name, values in batch.items():
            rows = np.empty(values.shape, self.dtype if values.dtype.kind == "f" else values.dtype)
            try:
                with np.errstate(over="raise"):
                    rows[...] = values
            except FloatingPointError as error:
                raise UserError(
                    f"{name} up to {np.abs(values).max():.3g} do not fit into {rows.dtype}; store float32"
                ) from error
            if self.folder is None:
                self.columns.setdefault(name, []).append(rows)
                continue
            with (self.folder / name).open("ab") as file:
                rows.tofile(file)
            self.columns[name] = [rows[:0]]

    def arrays(self) -> dict[str, np.ndarray]:
        """All rows; rows in files are memory-mapped."""
        if self.folder is None:
            return {name: np.concatenate(rows) for name, rows in self.columns.items()}
        return {name: _mapped(self.folder, name, rows.dtype, rows.shape[1:]) for name, (rows,) in self.columns.items()}


def _mapped(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    file = folder / name
    if not file.is_file():
        raise UserError(f"the rows of a process are missing: {folder}; all processes must write to this folder")
    return np.memmap(file, dtype, "r").reshape(-1, *shape)


@contextmanager
def shard_files(store: RowStore, path: Path, world: World) -> Iterator[None]:
    """Inside the block a store keeps the rows of this process in a folder beside the file that they are joined to."""
    if world.is_main:
        remove_shards(path)
        shards_folder(path).mkdir(parents=True)
    world.barrier()
    store.folder = shards_folder(path) / str(world.rank)
    store.folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(store.folder, ignore_errors=True)
        with suppress(OSError):
            shards_folder(path).rmdir()  # by the last process


def shards_folder(path: Path) -> Path:
    """The folder in which each process collects its rows of a file; it stays if they are killed."""
    return path.with_name(f".{path.stem}.shards")


def remove_shards(path: Path) -> None:
    """Remove what an extraction to this file left because it failed or was killed."""
    remove_unfinished(path)
    shutil.rmtree(shards_folder(path), ignore_errors=True)


def join_shards(
    path: Path,
    arrays: dict[str, np.ndarray],
    numbers: np.ndarray,
    constant: dict[str, np.ndarray],
    details: dict[str, Any],
    world: World,
    positions: np.ndarray | None = None,
) -> None:
    """Write the rows of all processes to one file, in the order of their numbers.

    Args:
        path: the file.
        arrays: rows of this process, in the files of its shard folder.
        numbers: (n,) number of each row among the rows of all processes; -1 for rows to leave out.
        constant: arrays that do not grow with the rows.
        details: header of the file.
        world: the processes.
        positions: (M,) index in the split of row r of a pass; row numbers go on through the passes.
    """
    shards = world.gather((numbers, {name: (value.dtype, value.shape[1:]) for name, value in arrays.items()}))
    written = np.sort(np.concatenate([numbers[numbers >= 0] for numbers, _ in shards]))
    if world.is_main:
        twice = written[1:][np.diff(written) == 0]
        if len(twice):
            raise UserError(f"sample {twice[0]} was written twice to the shards of {path}")
        fixed = {**constant, "indices": written if positions is None else positions[written % len(positions)]}
        shapes = {name: (value.shape, value.dtype) for name, value in fixed.items()}
        opened = []
        for rank, (_, kinds) in enumerate(shards):
            shapes |= {name: ((len(written), *shape), dtype) for name, (dtype, shape) in kinds.items()}
            folder = shards_folder(path) / str(rank)
            opened.append({name: _mapped(folder, name, *kind) for name, kind in kinds.items()})
        with create(path, shapes, details) as target:
            for name, value in fixed.items():
                target[name][...] = value
            for (numbers_there, _), columns in zip(shards, opened, strict=True):
                rows = np.flatnonzero(numbers_there >= 0)
                for start in range(0, len(rows), COPIED_ROWS):
                    some = rows[start : start + COPIED_ROWS]
                    slots = np.searchsorted(written, numbers_there[some])
                    for name, values in columns.items():
                        target[name][slots] = values[some]
    world.barrier()
