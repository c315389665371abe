"""Features and labels: checked, and features (N, D) read in chunks of rows.

Invalid ones raise a `UserError` that names the row or the class. Features are an array, a memory-mapped file, a sparse
matrix, or a subset of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from torch import Tensor

from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError
from longtail.posthoc.priors import check_target_prior, log_target

FLOATS = (np.float64, np.float32, np.float16)
CHUNK_NUMBERS = 1 << 21  # features or scores in a chunk: 8 MB in float32
SAMPLED = 1024  # rows that tell where the middle is
FARTHEST = 10.0  # times the median distance from it
SMALL = 1 << 22  # features; up to this number float64 is as fast


def check_features(estimator: Any, features: Any, *, reset: bool) -> Any:
    """Features (N, D) as an array of floats or a CSR matrix, all finite; nothing is copied that need not be."""
    from sklearn.utils.validation import validate_data

    if isinstance(features, torch.Tensor):
        tensor = features.detach().cpu()
        features = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    options = {"accept_sparse": "csr", "dtype": FLOATS, "ensure_all_finite": False, "reset": reset}
    try:
        checked = validate_data(estimator, features, **options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    if issparse(checked):
        checked = checked.astype(np.float64)
        _require_finite(checked.data, lambda at: int(np.searchsorted(checked.indptr, at, side="right")) - 1)
        return checked
    require_finite_rows(checked)
    return checked


def require_finite_rows(features: np.ndarray) -> None:
    """Refuse NaN and infinity in features (N, D); the row is named."""
    for where, chunk in Rows(features).raw():
        wrong = np.flatnonzero(~np.isfinite(chunk).all(1))
        if len(wrong):
            _refuse(chunk[wrong[0]], where.start + int(wrong[0]))


def _require_finite(values: np.ndarray, row_of: Any) -> None:
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        _refuse(values[wrong[:1]], row_of(wrong[0]))


def _refuse(values: np.ndarray, row: int) -> None:
    kind = "NaN" if np.isnan(values).any() else "infinity (inf)"
    raise UserError(f"X contains {kind} in row {row}; leave the row out, or compute its features again")


def check_labels(y: Any, number: int, declared: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Classes (K,) and codes (N,) int64 of labels (N,)."""
    from sklearn.utils import column_or_1d
    from sklearn.utils.multiclass import check_classification_targets

    if y is None:
        raise UserError("Probe requires y to be passed, but the target y is None")
    if isinstance(y, torch.Tensor):
        y = y.detach().cpu().numpy()
    try:
        labels = column_or_1d(y, warn=True)
        if labels.dtype.kind == "f" and not np.isfinite(labels).all():
            raise UserError(f"y contains NaN or infinity (inf) in row {int(np.argmin(np.isfinite(labels)))}")
        check_classification_targets(labels)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    if len(labels) != number:
        raise UserError(f"X has {number} rows, y has {len(labels)} labels; each row needs one label")
    present, codes = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        raise UserError(f"y has one class only ({present[0]}); a classifier needs two classes at least")
    if declared is None:
        return present, codes.astype(np.int64)
    classes = np.unique(np.asarray(declared))
    if len(classes) != len(declared):
        raise UserError("classes lists a class twice; list every class once")
    missing = np.setdiff1d(present, classes)
    if len(missing):
        raise UserError(f"y has the class {missing[0]}, which classes does not list")
    return classes, np.searchsorted(classes, labels).astype(np.int64)


def log_target_prior(
    target_prior: Any, log_prior: np.ndarray, classes: Sequence[Any] | np.ndarray, *, unseen: str = "prior"
) -> np.ndarray:
    """Logarithm (K,) of a target prior, -inf for a class that is never predicted; a dict gives weights by class.

    A class without samples, at -inf in `log_prior`, is predicted by its "prior" or "never".
    """
    names = [str(name) for name in classes]
    if isinstance(target_prior, dict):
        given = {str(name): weight for name, weight in target_prior.items()}
        unknown, missing = [n for n in given if n not in names], [n for n in names if n not in given]
        if unknown:
            raise UserError(f"target_prior has a weight for {unknown[0]}, which is no class; the first is {names[0]}")
        if missing:
            raise UserError(f"target_prior has no weight for class {missing[0]}; give 0 for a class that never occurs")
        target_prior = [given[name] for name in names]
    check_target_prior(target_prior)
    seen = np.isfinite(log_prior)
    finite = np.where(seen, log_prior, 0.0)
    target = np.array(log_target(target_prior, finite, names), dtype=np.float64)
    follows_training = isinstance(target_prior, float | int | np.number) or str(target_prior) == "train"
    if unseen == "never" or (follows_training and target_prior != 0):
        target[~seen] = -np.inf  # a class without samples has the training prior 0
    return target


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
        self.middle: np.ndarray | None = None
        self.factors: np.ndarray | None = None  # (N,) below 1 for rows that are moved towards the middle
        self.sparse = not isinstance(features, np.ndarray)
        self.dtype = torch.float64 if self.sparse or features.size <= SMALL else torch.float32

    def __len__(self) -> int:
        return int(self.features.shape[0]) if self.chosen is None else len(self.chosen)

    @property
    def width(self) -> int:
        return int(self.features.shape[1])

    def only(self, chosen: np.ndarray) -> Rows:
        """A subset of these rows."""
        rows = Rows(self.features, chosen if self.chosen is None else self.chosen[chosen], self.columns, self.world)
        rows.middle, rows.factors = self.middle, None if self.factors is None else self.factors[chosen]
        return rows

    def bound(self) -> int:
        """Move rows towards the middle that are as far from it as no valid features are; their number."""
        if self.sparse:
            return 0
        some = self.only(np.linspace(0, len(self) - 1, min(len(self), SAMPLED)).astype(np.int64))
        sample = np.concatenate([np.asarray(chunk, np.float64) for _, chunk in some.raw()])
        middle = np.median(sample, 0)
        spread = sample.std(0)
        unit = np.divide(1, spread, out=np.zeros_like(spread), where=spread > 0)
        away = np.concatenate([np.linalg.norm((chunk - middle) * unit, axis=1) for _, chunk in self.raw()])
        limit = FARTHEST * np.median(away)
        if limit > 0 and (far := away > limit).any():
            self.middle, self.factors = middle, np.where(far, limit / np.maximum(away, limit), 1.0)
            return int(far.sum())
        return 0

    def copies(self, labels: np.ndarray) -> np.ndarray:
        """(N,) numbers of the samples in order of appearance; the same one for the same features and label (N,)."""
        numbers, found = np.empty(len(self), dtype=np.int64), dict[tuple[bytes, int], int]()
        for where, chunk in self.raw():
            for row, label in enumerate(labels[where]):
                if self.sparse:
                    own = slice(*chunk.indptr[row : row + 2])
                    content = chunk.indices[own].tobytes() + chunk.data[own].tobytes()
                else:
                    content = chunk[row].tobytes()
                key = blake2b(content, digest_size=16).digest(), int(label)
                numbers[where.start + row] = found.setdefault(key, len(found))
        return numbers

    def slices(self, *, shared: bool = False) -> Iterator[slice]:
        """The rows of each chunk, or of the chunks of this process."""
        first, last = self.world.share(len(self)) if shared else (0, len(self))
        size = max(CHUNK_NUMBERS // max(self.columns, 1 if self.sparse else self.width), 16)
        for start in range(first, last, size):
            yield slice(start, min(start + size, last))

    def raw(self, *, shared: bool = False) -> Iterator[tuple[slice, Any]]:
        """Chunks (B, D) as they are stored."""
        for where in self.slices(shared=shared):
            chunk = self.features[where if self.chosen is None else self.chosen[where]]
            if self.factors is not None and (far := np.flatnonzero(self.factors[where] < 1)).size:
                chunk = np.array(chunk, dtype=np.float64 if self.dtype == torch.float64 else np.float32)
                chunk[far] = self.middle + (chunk[far] - self.middle) * self.factors[where][far, None]
            yield where, chunk

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
