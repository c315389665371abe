"""Logits of many samples, read some rows at a time: stored, mapped from a file, or computed from features."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from longtail.files.arrays import writable

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
        places = chosen if self._chosen is None else self._chosen[chosen]
        if self._weight is None:
            return LogitRows(self._rows, bias=self._bias, chosen=places)
        return LogitRows(features=self._rows, weight=self._weight, bias=self._bias, chosen=places)

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
        own = (self.stored.read(rows).double() * self._weight[labels].double()).sum(1)
        return own if self._bias is None else own + self._bias[labels].double()

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
