"""Rows of outputs: read a chunk at a time (stored, mapped from a file, or computed from features), and written.

They are collected batch by batch, in memory or in files, and joined into one file in sample order.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
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


class LogitRows:
    """Logits (N, K) read in float32 chunks: given, or computed from features and a linear head.

    Args:
        logits: (N, K) array or tensor of any float or integer type; may be memory-mapped.
        features: (N, D), instead of logits.
        weight: (K, D) of the head, with features.
        bias: (K,) of the head, with features; or added to the logits.
        chosen: (N,) rows of these arrays to use; all if omitted.
    """

    def __init__(
        self,
        logits: np.ndarray | Tensor | None = None,
        *,
        features: np.ndarray | Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        chosen: np.ndarray | None = None,
    ) -> None:
        self._rows = logits if logits is not None else features
        self._weight = None if logits is not None else weight
        self._bias = bias
        self._chosen = chosen

    def only(self, chosen: np.ndarray) -> LogitRows:
        """Some of the rows, by their numbers; nothing is copied, and rows are read when they are needed."""
        rows = chosen if self._chosen is None else self._chosen[chosen]
        if self._weight is None:
            return LogitRows(self._rows, bias=self._bias, chosen=rows)
        return LogitRows(features=self._rows, weight=self._weight, bias=self._bias, chosen=rows)

    def plus(self, offset: Tensor) -> LogitRows:
        """The same logits with an offset (K,) added."""
        bias = offset.float() if self._bias is None else self._bias + offset.float()
        if self._weight is None:
            return LogitRows(self._rows, bias=bias, chosen=self._chosen)
        return LogitRows(features=self._rows, weight=self._weight, bias=bias, chosen=self._chosen)

    @property
    def shape(self) -> tuple[int, int]:
        assert self._rows is not None
        columns = self._rows.shape[1] if self._weight is None else self._weight.shape[0]
        return self._rows.shape[0] if self._chosen is None else len(self._chosen), columns

    def read(self, rows: slice | np.ndarray, out: Tensor | None = None) -> Tensor:
        """Logits of some rows, (B, K) float32; computed ones are put into the first rows of `out`, if given."""
        assert self._rows is not None
        chunk = writable(self._rows[rows if self._chosen is None else self._chosen[rows]]).to(torch.float32)
        if self._weight is None:
            return chunk if self._bias is None else chunk + self._bias
        # Class by class: with thousands of classes a product of this shape is 1.6 times as fast as `linear`.
        into = None if out is None else out[: len(chunk)].T
        if self._bias is None:
            return torch.mm(self._weight, chunk.T, out=into).T
        return torch.addmm(self._bias.unsqueeze(1), self._weight, chunk.T, out=into).T

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """An empty chunk (B, K), in memory as `read` returns them: stored ones by row, computed ones by class."""
        rows, classes = self.chunk_rows, self.shape[1]
        if self._weight is None:
            return torch.empty(rows, classes, dtype=dtype)
        return torch.empty(classes, rows, dtype=dtype).T

    @property
    def stored(self) -> LogitRows:
        """The array that is read: the logits themselves, or the features they are computed from."""
        plain = self._weight is None and self._bias is None
        return self if plain else LogitRows(self._rows, chosen=self._chosen)

    def of_labels(self, rows: slice, labels: Tensor) -> Tensor:
        """The logit of each row's own class, (B,) float64; from features this costs no pass over all classes."""
        if self._weight is None:
            return self.read(rows).gather(1, labels.unsqueeze(1)).squeeze(1).double()
        logits = (self.stored.read(rows).double() * self._weight[labels].double()).sum(1)
        return logits if self._bias is None else logits + self._bias[labels].double()

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk."""
        if self._weight is None:
            return min(max(CHUNK_NUMBERS // self.shape[1], 1), CHUNK_ROWS)
        return min(max(COMPUTED_NUMBERS // self.shape[1] // STEP_ROWS, 1) * STEP_ROWS, CHUNK_ROWS)

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


class RowStore:
    """Collects the rows of several arrays batch by batch, in memory or in files of a folder.

    Args:
        dtype: type in which floating-point numbers are stored.
        folder: folder of the files; None for memory.
        without: names of arrays that are not stored.
    """

    def __init__(self, dtype: np.dtype, folder: Path | None = None, without: tuple[str, ...] = ()) -> None:
        self.dtype = dtype
        self.folder = folder
        self.without = without
        self._arrays: dict[str, list[np.ndarray]] = {}
        if folder is not None:
            folder.mkdir(parents=True)

    def add(self, **arrays: np.ndarray) -> None:
        """Rows of one batch."""
        for name, values in arrays.items():
            if name in self.without:
                continue
            rows = np.empty(values.shape, self.dtype if values.dtype.kind == "f" else values.dtype)
            try:
                with np.errstate(over="raise"):
                    rows[...] = values
            except FloatingPointError as error:
                raise UserError(
                    f"{name} up to {np.abs(values).max():.3g} do not fit into {rows.dtype}; store float32"
                ) from error
            stored = self._arrays.setdefault(name, [])
            if self.folder is None:
                stored.append(rows)
                continue
            with (self.folder / name).open("ab") as file:
                rows.tofile(file)
            stored[:] = [rows[:0]]  # its type and width

    def arrays(self) -> dict[str, np.ndarray]:
        """All rows; rows in files are memory-mapped."""
        if self.folder is None:
            return {name: np.concatenate(rows) for name, rows in self._arrays.items()}
        return {name: _mapped(self.folder, name, rows.dtype, rows.shape[1:]) for name, (rows,) in self._arrays.items()}


def _mapped(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    file = folder / name
    if not file.is_file():
        raise UserError(f"the rows of a process are missing: {folder}; all processes must write to this folder")
    return np.memmap(file, dtype, "r").reshape(-1, *shape)


@contextmanager
def row_store(path: Path | None, dtype: np.dtype, world: World, without: tuple[str, ...] = ()) -> Iterator[RowStore]:
    """A store for the rows of this process: in memory or, with the path of the file to write, beside that file."""
    if path is None:
        yield RowStore(dtype, without=without)
        return
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_shards(path)
    world.barrier()
    folder = shard_folder(path, world.rank)
    try:
        yield RowStore(dtype, folder, without)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shard_folder(path: Path, rank: int) -> Path:
    """The folder in which process `rank` collects its rows of a file."""
    return path.with_name(f".{path.stem}.part{rank}")


def shard_folders(path: Path) -> list[Path]:
    """The folders that processes have left beside a file, because they were killed or are running."""
    return list(path.parent.glob(f".{escape(path.stem)}.part*"))


def remove_shards(path: Path) -> None:
    """Remove what an extraction to this file left because it failed or was killed."""
    remove_unfinished(path)
    for left in shard_folders(path):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def join_shards(
    path: Path,
    arrays: dict[str, np.ndarray],
    numbers: np.ndarray,
    constant: dict[str, np.ndarray],
    details: dict[str, Any],
    world: World,
    positions: np.ndarray | None = None,
) -> int:
    """Write the rows of all processes to one file, in the order of their numbers; returns how many there are.

    Args:
        path: the file.
        arrays: rows of this process, in the files of its shard folder.
        numbers: (n,) number of each row among the rows of all processes; -1 for rows to leave out.
        constant: arrays that do not grow with the rows.
        details: header of the file.
        world: the processes.
        positions: (M,) index in the split of row r of a pass; row numbers go on through the passes.
    """
    kinds = {name: (value.dtype, value.shape[1:]) for name, value in arrays.items()}
    shards = world.gather((numbers, kinds))
    kinds = next((kinds for _, kinds in shards if kinds), {})
    written = np.sort(np.concatenate([numbers[numbers >= 0] for numbers, _ in shards]))
    if world.is_main:
        twice = written[1:][np.diff(written) == 0]
        if len(twice):
            raise UserError(f"sample {twice[0]} was written twice to the shards of {path}")
        shapes = {name: ((len(written), *shape), dtype) for name, (dtype, shape) in kinds.items()}
        shapes |= {"indices": (written.shape, np.dtype(np.int64))}
        shapes |= {name: (value.shape, value.dtype) for name, value in constant.items()}
        opened = [
            {name: _mapped(shard_folder(path, rank), name, *kind) for name, kind in of_rank.items()}
            for rank, (_, of_rank) in enumerate(shards)
        ]
        with create(path, shapes, details) as target:
            for name, value in constant.items():
                target[name][...] = value
            target["indices"][...] = written if positions is None else positions[written % len(positions)]
            for rank, (numbers_there, _) in enumerate(shards):
                rows = np.flatnonzero(numbers_there >= 0)
                for start in range(0, len(rows), COPIED_ROWS):
                    some = rows[start : start + COPIED_ROWS]
                    slots = np.searchsorted(written, numbers_there[some])
                    for name, values in opened[rank].items():
                        target[name][slots] = values[some]
    world.barrier()
    return len(written)
