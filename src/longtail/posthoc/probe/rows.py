"""Features (N, D) read in chunks of rows: an array, a memory-mapped file, a sparse matrix, or a subset of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World

CHUNK_NUMBERS = 1 << 21  # features or scores in a chunk: 8 MB in float32
SMALL = 1 << 22  # features; up to this number float64 is as fast


class Rows:
    """Some rows of features (N, D).

    Args:
        features: a dense array of any float type, or a sparse matrix in CSR format.
        chosen: (M,) the rows to read, in rising order; all if omitted.
        columns: read these columns of scores beside the features: the chunks become smaller.
        world: processes that share the rows where a method is called with `shared`; each can read all of them.
    """

    def __init__(
        self, features: Any, chosen: np.ndarray | None = None, columns: int = 1, world: World = SINGLE_PROCESS
    ) -> None:
        self.features = features
        self.chosen = chosen
        self.columns = columns
        self.world = world
        self.sparse = not isinstance(features, np.ndarray)
        self.dtype = torch.float64 if self.sparse or features.size <= SMALL else torch.float32

    def __len__(self) -> int:
        return int(self.features.shape[0]) if self.chosen is None else len(self.chosen)

    @property
    def width(self) -> int:
        return int(self.features.shape[1])

    def only(self, chosen: np.ndarray) -> Rows:
        """A subset of these rows."""
        return Rows(self.features, chosen if self.chosen is None else self.chosen[chosen], self.columns, self.world)

    def slices(self, *, shared: bool = False) -> Iterator[slice]:
        """The rows of each chunk, or of the chunks of this process."""
        first, last = self.world.share(len(self)) if shared else (0, len(self))
        size = max(CHUNK_NUMBERS // max(self.columns, 1 if self.sparse else self.width), 16)
        for start in range(first, last, size):
            yield slice(start, min(start + size, last))

    def raw(self, *, shared: bool = False) -> Iterator[tuple[slice, Any]]:
        """Chunks (B, D) as they are stored."""
        for where in self.slices(shared=shared):
            yield where, self.features[where if self.chosen is None else self.chosen[where]]

    def dense(self, centre: Tensor, *, shared: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Chunks (B, D) of a dense array minus a centre (D,)."""
        for where, chunk in self.raw(shared=shared):
            values = torch.from_numpy(np.array(chunk, dtype=np.float64 if self.dtype == torch.float64 else np.float32))
            yield where, values.sub_(centre.to(self.dtype))

    def scores(self, weight: Tensor, bias: Tensor, centre: Tensor) -> Tensor:
        """Scores (N, K) of all rows by a head on centred features; the processes share the work."""
        out = torch.zeros(len(self), len(bias), dtype=self.dtype)
        for where, chunk in self.chunks(weight, centre, shared=True):
            out[where] = chunk.scores(bias)
        return self.world.sum(out)

    def chunks(self, weight: Tensor, centre: Tensor, *, shared: bool = False) -> Iterator[tuple[slice, Chunk]]:
        """Chunks of rows beside a weight (K, D) on centred features."""
        if not self.sparse:
            for where, values in self.dense(centre, shared=shared):
                yield where, Chunk(values, weight)
            return
        shift = weight @ centre
        for where, chunk in self.raw(shared=shared):
            yield where, SparseChunk(chunk, weight, shift, centre)


class Chunk:
    """Dense centred features (B, D) and the weight (K, D) that scores them."""

    def __init__(self, values: Tensor, weight: Tensor) -> None:
        self.values = values
        self.weight = weight

    def scores(self, bias: Tensor) -> Tensor:
        """(B, K)."""
        return torch.addmm(bias, self.values, self.weight.T)

    def gradient(self, error: Tensor) -> Tensor:
        """(K, D): the sum over rows of error (B, K) times the centred features."""
        return error.T @ self.values


class SparseChunk(Chunk):
    """Sparse features (B, D); the centre (D,) is subtracted from results, so that nothing becomes dense."""

    def __init__(self, values: Any, weight: Tensor, shift: Tensor, centre: Tensor) -> None:
        self.values = values
        self.weight = weight
        self.shift = shift
        self.centre = centre

    def scores(self, bias: Tensor) -> Tensor:
        return torch.from_numpy(self.values @ self.weight.numpy().T) + (bias - self.shift)

    def gradient(self, error: Tensor) -> Tensor:
        summed = torch.from_numpy(self.values.T @ error.numpy()).T
        return summed - torch.outer(error.sum(0), self.centre)
