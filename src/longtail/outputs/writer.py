"""Writing outputs row by row, one file per process, and joining the files in sample order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor

from longtail.core.files import remove_unfinished
from longtail.core.mapped import create, read, rewrite
from longtail.distributed.world import World
from longtail.errors import UserError

COPIED_ROWS = 8192


class Rows:
    """Collects the rows of several arrays batch by batch, in memory or in files of a folder.

    Args:
        dtype: type in which floating-point numbers are stored.
        folder: folder of the files; None for memory.
    """

    def __init__(self, dtype: np.dtype, folder: Path | None = None) -> None:
        self.dtype = dtype
        self.folder = folder
        self.arrays: dict[str, list[np.ndarray]] = {}

    def add(self, **arrays: np.ndarray) -> None:
        """Rows of one batch."""
        for name, values in arrays.items():
            kept = np.empty(values.shape, self.dtype if values.dtype.kind == "f" else values.dtype)
            store(values, kept, name)
            known = self.arrays.setdefault(name, [])
            if self.folder is None:
                known.append(kept)
                continue
            with (self.folder / name).open("ab") as file:
                kept.tofile(file)
            known[:] = [kept[:0]]  # its type and width

    def joined(self) -> dict[str, np.ndarray]:
        """All rows; rows in files are memory-mapped."""
        if self.folder is None:
            return {name: np.concatenate(parts) for name, parts in self.arrays.items()}
        return {
            name: np.memmap(self.folder / name, part.dtype, "r").reshape(-1, *part.shape[1:])
            for name, (part,) in self.arrays.items()
        }


def part_path(path: Path, rank: int) -> Path:
    """The file to which process `rank` writes its rows."""
    return path.with_name(f".{path.stem}.part{rank}.safetensors")


def remove_parts(path: Path, world: World) -> None:
    """Remove the files that an earlier extraction left because it failed or was killed."""
    if not world.is_main:
        return
    remove_unfinished(path)
    for left in _parts(path):
        left.unlink(missing_ok=True)


def has_parts(path: Path) -> bool:
    """Whether files with the rows of single processes exist beside a file."""
    return bool(_parts(path))


def _parts(path: Path) -> list[Path]:
    parts = f".{escape(path.stem)}.part*.safetensors"
    return [*path.parent.glob(parts), *path.parent.glob(f".{parts}.*.part")]


def store(values: np.ndarray, place: np.ndarray, name: str) -> None:
    """Copy values into an array that may have a smaller type; raises if a value does not fit."""
    try:
        with np.errstate(over="raise"):
            place[...] = values
    except FloatingPointError as error:
        raise UserError(
            f"{name} up to {np.abs(values).max():.3g} do not fit into {place.dtype}; store float32"
        ) from error


class RowWriter:
    """The rows of one process, written to disk batch by batch.

    Args:
        path: the file that is joined from all parts at the end.
        rows: maximum number of rows.
        widths: number of columns of `features` and `logits`; None if one is not stored.
        dtype: type of both.
        constant: arrays that do not grow with the rows.
        details: header of the file.
        world: this process among the others.
    """

    def __init__(
        self,
        path: Path,
        rows: int,
        widths: dict[str, int | None],
        dtype: np.dtype,
        constant: dict[str, np.ndarray],
        details: dict[str, Any],
        world: World,
    ) -> None:
        shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "labels": ((rows,), np.dtype(np.int64)),
            "indices": ((rows,), np.dtype(np.int64)),
        }
        shapes |= {name: (value.shape, value.dtype) for name, value in constant.items()}
        shapes |= {name: ((rows, width), dtype) for name, width in widths.items() if width is not None}
        self._constant = constant
        self._file = create(part_path(path, world.rank), shapes, details)
        self._stack = ExitStack()
        self._used = 0

    def __enter__(self) -> Self:
        self._arrays = self._stack.enter_context(self._file)
        for name, value in self._constant.items():
            self._arrays[name][...] = value
        self._arrays["indices"][...] = -1  # rows that are never written stay marked
        return self

    def add(self, features: Tensor, logits: Tensor, labels: Tensor, numbers: Tensor) -> None:
        """Rows of one batch; `numbers` order them among all."""
        rows = slice(self._used, self._used + len(labels))
        values = {"features": features, "logits": logits, "labels": labels, "indices": numbers}
        for name, value in values.items():
            if name in self._arrays:
                store(value.detach().cpu().numpy(), self._arrays[name][rows], name)
        self._used = rows.stop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


def join_parts(path: Path, world: World, expected: int, places: np.ndarray) -> int:
    """Join the parts of all processes in the order of their numbers; returns how many rows are missing.

    `places` (M,) are the positions of the samples of one pass in their split; they become the `indices` of the file.
    """
    world.barrier()
    missing = 0
    if world.is_main:
        parts = [part_path(path, rank) for rank in range(world.size)]
        absent = [part.name for part in parts if not part.is_file()]
        if absent:
            raise UserError(
                f"the rows of a process are missing: {path.parent / absent[0]}; all processes must write to this folder"
            )
        opened = [read(part) for part in parts]
        numbers = np.concatenate([arrays["indices"] for arrays, _ in opened])
        written = np.sort(numbers[numbers >= 0])
        twice = written[1:][np.diff(written) == 0]
        if len(twice):
            raise UserError(f"sample {places[twice[0] % len(places)]} was written twice to the parts of {path}")
        missing = expected - len(written)
        if len(parts) == 1 and missing == 0:
            _finish_single(parts[0], path, places)
        else:
            _copy_rows(opened, written, path, places)
        for part in parts:
            part.unlink(missing_ok=True)
    return int(world.gather(missing)[0])


def _finish_single(part: Path, path: Path, places: np.ndarray) -> None:
    """A single process wrote every row in order, so only the numbers change."""
    arrays, _ = read(part)
    numbers = arrays["indices"][:]
    shown = places[numbers % len(places)]
    if (numbers != shown).any():
        rewrite(part, "indices", shown)
    part.replace(path)


def _copy_rows(
    opened: list[tuple[dict[str, np.ndarray], dict[str, Any]]], written: np.ndarray, path: Path, places: np.ndarray
) -> None:
    first, details = opened[0]
    growing = [name for name in ("labels", "indices", "features", "logits") if name in first]
    shapes = {name: (value.shape, value.dtype) for name, value in first.items()}
    shapes |= {name: ((len(written), *first[name].shape[1:]), first[name].dtype) for name in growing}
    with create(path, shapes, details) as target:
        for name in first.keys() - set(growing):
            target[name][...] = first[name]
        for arrays, _ in opened:
            for rows in _pieces(arrays["indices"]):
                numbers = arrays["indices"][rows]
                rows_there = np.searchsorted(written, numbers)
                shown = places[numbers % len(places)]
                for name in growing:
                    target[name][rows_there] = shown if name == "indices" else arrays[name][rows]


def _pieces(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """The rows that were written, a few thousand at a time."""
    rows = np.flatnonzero(numbers >= 0)
    for start in range(0, len(rows), COPIED_ROWS):
        yield rows[start : start + COPIED_ROWS]
